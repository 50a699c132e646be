"""One switch that keeps tests away from paid models.

After `forbid_network_models()`, building or calling a model whose base URL is not on this machine raises
`NetworkModelForbidden`. The pytest plugin throws the switch; `with allow_network_models():` opens a gap in it. Both
are process-wide: a fixture and the test that uses it run in different tasks, and both must see the same.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from hermes_trio.net.dial import Origin

__all__ = [
    "NetworkModelForbidden",
    "allow_network_models",
    "check_network_allowed",
    "forbid_network_models",
    "permit_network_models",
]


class NetworkModelForbidden(RuntimeError):
    """A model outside this machine was built or called although network models are forbidden in this process."""


class _Switch:
    forbidden: bool = False
    allowances: int = 0


_switch = _Switch()


def forbid_network_models() -> None:
    """From now on, refuse models that are not on loopback."""
    _switch.forbidden = True


def permit_network_models() -> None:
    """Undo `forbid_network_models`."""
    _switch.forbidden = False


@contextmanager
def allow_network_models() -> Generator[None]:
    """Let network models through for the body of the `with`, whatever has been forbidden."""
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
