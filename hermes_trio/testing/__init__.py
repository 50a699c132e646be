"""Fakes, contracts and checks for programs that embed the runtime. `__all__` lists the public names; each is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_trio.base.lazy import lazy_attributes

if TYPE_CHECKING:
    from .contracts.adapter import AdapterBench, AdapterContract, RecordingHub
    from .contracts.gateway_store import GatewayStoreContract
    from .contracts.store import StoreContract
    from .fakes import FakeAdapter, ScriptedAgent, Sent, fake_job
    from .faults import InjectedFault, StoreFaultKind, StoreFaults
    from .gateway import GatewayOptions, OpenTestGateway, eventually, open_test_gateway
    from .memory_platform import Delivered, MemoryPlatform
    from .model_server import ModelServer, ScriptedAnswer, ScriptedRefusal

__all__ = [
    "AdapterBench",
    "AdapterContract",
    "Delivered",
    "FakeAdapter",
    "GatewayOptions",
    "GatewayStoreContract",
    "InjectedFault",
    "MemoryPlatform",
    "ModelServer",
    "OpenTestGateway",
    "RecordingHub",
    "ScriptedAgent",
    "ScriptedAnswer",
    "ScriptedRefusal",
    "Sent",
    "StoreContract",
    "StoreFaultKind",
    "StoreFaults",
    "eventually",
    "fake_job",
    "open_test_gateway",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        ".contracts.adapter": ["AdapterBench", "AdapterContract", "RecordingHub"],
        ".contracts.gateway_store": ["GatewayStoreContract"],
        ".contracts.store": ["StoreContract"],
        ".fakes": ["FakeAdapter", "ScriptedAgent", "Sent", "fake_job"],
        ".faults": ["InjectedFault", "StoreFaultKind", "StoreFaults"],
        ".gateway": ["GatewayOptions", "OpenTestGateway", "eventually", "open_test_gateway"],
        ".memory_platform": ["Delivered", "MemoryPlatform"],
        ".model_server": ["ModelServer", "ScriptedAnswer", "ScriptedRefusal"],
    },
)


def __dir__() -> list[str]:
    return list(__all__)
