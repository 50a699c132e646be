"""The store's port: what the layers above may ask of it, whatever the backend."""

from __future__ import annotations

from typing import Protocol

from hermes_trio.runtime.ports import RuntimeStore

__all__ = ["Store"]


class Store(RuntimeStore, Protocol):
    """Everything that is written down. Each verb is one transaction."""
