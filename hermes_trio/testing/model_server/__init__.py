"""A model provider on loopback that speaks the real wire formats, obeys a script, and can be as bad as a real one.

`ModelServer` answers OpenAI chat completions and Anthropic messages, streamed or whole, and refuses what the real
APIs refuse. It keeps a record of every call, with the moment in which its client left. It runs in the caller's
nursery (`server = await nursery.start(ModelServer(…).run)`) or in its own (`async with open_model_server(…) as
server`), and ends with it. `python -m hermes_trio.testing.model_server` runs one by itself.
"""

from __future__ import annotations

from .script import Fault, Reply, ScriptedAnswer, ScriptedCall, ScriptedRefusal
from .server import ModelServer, open_model_server

__all__ = ["Fault", "ModelServer", "Reply", "ScriptedAnswer", "ScriptedCall", "ScriptedRefusal", "open_model_server"]
