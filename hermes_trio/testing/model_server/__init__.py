"""A model provider on loopback that uses the real wire formats, follows a script, and can inject the faults of a real one.

`ModelServer` answers OpenAI chat completions and Anthropic messages, streamed or whole, and refuses what the real
APIs refuse. It records every call, with the time at which its client disconnected. It runs in the caller's
nursery (`server = await nursery.start(ModelServer(…).run)`) or in its own (`async with open_model_server(…) as
server`), and ends with it. `python -m hermes_trio.testing.model_server` runs one by itself.
"""

from __future__ import annotations

from .script import Fault, Reply, ScriptedAnswer, ScriptedCall, ScriptedRefusal
from .server import ModelServer, open_model_server

__all__ = ["Fault", "ModelServer", "Reply", "ScriptedAnswer", "ScriptedCall", "ScriptedRefusal", "open_model_server"]
