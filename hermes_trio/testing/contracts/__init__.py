"""Contracts as test suites: subclass one in a test module, implement how to open the object under test, and pytest runs its tests.

`AdapterContract` is for adapters of chat platforms, `StoreContract` for stores of a runtime, `GatewayStoreContract` for stores of a whole gateway (the
classes of its slices are in `gateway_store`). All of them need pytest-trio (`pip install hermes-trio[pytest]`).
"""

from .adapter import AdapterBench, AdapterContract, RecordingHub
from .gateway_store import GatewayStoreContract
from .store import StoreContract

__all__ = ["AdapterBench", "AdapterContract", "GatewayStoreContract", "RecordingHub", "StoreContract"]
