"""Serving ASGI applications on Trio: Hypercorn, with a fast connection of our own for plain HTTP/1.1.

`serve(app, ServerConfig(...), shutdown=event)` is the whole server. The rest is for applications: hot routes and
their plain helpers, event streams, and the fixes for stock Hypercorn and Quart-Trio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_trio.base.lazy import lazy_attributes
from hermes_trio.http.server.asgi import ASGIApp, Message, Receive, Scope, Send
from hermes_trio.http.server.bodies import BodyTooLarge, ClientLeft, InvalidJSON, decode_json, read_body
from hermes_trio.http.server.config import ServerConfig, hypercorn_config
from hermes_trio.http.server.endings import Ending, ending_of
from hermes_trio.http.server.events import EventStreamWriter, encode_event
from hermes_trio.http.server.hypercorn_fixes import bound_stock_sends, with_fixes
from hermes_trio.http.server.responses import HeaderBlock
from hermes_trio.http.server.routes import HotRoutes, send_json
from hermes_trio.http.server.serve import LifespanCrashed, ShutdownSignal, serve

if TYPE_CHECKING:
    from hermes_trio.http.server.quart_fixes import FixedQuartTrio, unbounded

__all__ = [
    "ASGIApp",
    "BodyTooLarge",
    "ClientLeft",
    "Ending",
    "EventStreamWriter",
    "FixedQuartTrio",
    "HeaderBlock",
    "HotRoutes",
    "InvalidJSON",
    "LifespanCrashed",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "ServerConfig",
    "ShutdownSignal",
    "bound_stock_sends",
    "decode_json",
    "encode_event",
    "ending_of",
    "hypercorn_config",
    "read_body",
    "send_json",
    "serve",
    "unbounded",
    "with_fixes",
]


# What needs Quart is loaded when it is asked for.
__getattr__ = lazy_attributes(__name__, {".quart_fixes": ("FixedQuartTrio", "unbounded")})
