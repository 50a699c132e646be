"""A switch that keeps tests away from paid models.

After `forbid_network_models()`, building or calling a model whose base URL is not on this machine raises `NetworkModelForbidden`. The pytest plugin
sets the switch; `with allow_network_models():` suspends it. Both are process-wide: a fixture and its test run in different tasks and must see the
same.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from hermes_trio.net.dial import Origin


class NetworkModelForbidden(RuntimeError):
    """Raised when a model outside this machine is built or called while network models are forbidden in this process."""


class _Switch:
    forbidden: bool = False
    allowances: int = 0


_switch = _Switch()


def forbid_network_models() -> None:
    """Refuse models that are not on loopback from now on."""
    _switch.forbidden = True


def permit_network_models() -> None:
    """Undo `forbid_network_models`."""
    _switch.forbidden = False


@contextmanager
def allow_network_models() -> Generator[None]:
    """Allow network models for the body of the `with`, even if they are forbidden."""
    _switch.allowances += 1
    try:
        yield
    finally:
        _switch.allowances -= 1


def check_network_allowed(name: str, origin: Origin) -> None:
    """Raise `NetworkModelForbidden` unless this model may be built or called here."""
    if _switch.forbidden and not _switch.allowances and not origin.loopback:
        raise NetworkModelForbidden(
            f"the model {name!r} would call {origin}, and network models are forbidden in this process. "
            "Use the demo model or hermes_trio.testing.model_server, or wrap the call in `with allow_network_models():`"
        )
