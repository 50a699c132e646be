"""The official `openai` client for Node, from npm, unmodified, against the real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import trio

from tests.http.gateway import KEY as ADMIN_KEY
from tests.http.test_repeated_requests import tool_then, world

from .server_process import server_process

pytestmark = pytest.mark.slow

SCRIPT = """
import OpenAI from "openai";
import assert from "node:assert/strict";

const client = new OpenAI({ baseURL: process.env.BASE, apiKey: process.env.KEY, maxRetries: 0 });
const done = [];

const chat = await client.chat.completions.create({ model: "demo", messages: [{ role: "user", content: "Hello" }] });
assert.equal(chat.choices[0].message.content, "You said: Hello");
done.push("chat");

let text = "";
const stream = await client.chat.completions.create({
  model: "demo", messages: [{ role: "user", content: "Hello" }], stream: true, stream_options: { include_usage: true },
});
let usage = null;
for await (const chunk of stream) { text += chunk.choices[0]?.delta?.content ?? ""; usage = chunk.usage ?? usage; }
assert.equal(text, "You said: Hello");
assert.ok(usage.total_tokens > 0);
done.push("chat stream");

const first = await client.responses.create({ model: "demo", input: "Hello" });
assert.equal(first.output_text, "You said: Hello");
const second = await client.responses.create({ model: "demo", input: "Again", previous_response_id: first.id });
assert.equal(second.previous_response_id, first.id);
assert.equal((await client.responses.retrieve(second.id)).output_text, "You said: Again");
await client.responses.delete(second.id);
await assert.rejects(client.responses.retrieve(second.id), OpenAI.NotFoundError);
done.push("responses");

const events = client.responses.stream({ model: "demo", input: "Hello there" });
const types = [];
for await (const event of events) types.push(event.type);
assert.equal((await events.finalResponse()).output_text, "You said: Hello there");
assert.deepEqual(types.slice(0, 2), ["response.created", "response.in_progress"]);
assert.equal(types.at(-1), "response.completed");
done.push("responses stream");

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.equal(models[0], "hermes-trio");
assert.equal((await client.models.retrieve("hermes-trio")).id, "hermes-trio");
done.push("models");

await assert.rejects(client.chat.completions.create({ model: "demo", messages: [] }), OpenAI.BadRequestError);
await assert.rejects(client.models.retrieve("nope"), OpenAI.NotFoundError);
const stranger = new OpenAI({ baseURL: process.env.BASE, apiKey: "wrong-key-0123456789", maxRetries: 0 });
await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
done.push("errors");

const run = await client.post("/runs", { body: { input: "!sleep 1.5" } });
assert.ok(run.run_id);
await assert.rejects(
  client.chat.completions.create({ model: "demo", messages: [{ role: "user", content: "Hello" }] }), OpenAI.RateLimitError);
const patient = new OpenAI({ baseURL: process.env.BASE, apiKey: process.env.KEY, maxRetries: 5 });
const late = await patient.chat.completions.create({ model: "demo", messages: [{ role: "user", content: "Hello" }] });
assert.equal(late.choices[0].message.content, "You said: Hello");
done.push("retry");

console.log(JSON.stringify(done));
"""

REPEATING = """
import OpenAI from "openai";
import assert from "node:assert/strict";

const client = new OpenAI({ baseURL: process.env.BASE, apiKey: process.env.KEY });
const asked = { model: "demo", messages: [{ role: "user", content: "do it" }] };
await assert.rejects(client.chat.completions.create(asked), (error) => error.status === 424);
"""


def project_of(folder: Path, script: str) -> Path:
    """A project with the client from npm and this script."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("node and npm are not installed")
    project = folder / "project"
    project.mkdir()
    (project / "package.json").write_text('{"type": "module", "private": true}')
    installed = subprocess.run(
        [npm, "install", "openai", "--no-audit", "--no-fund", "--silent"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if installed.returncode != 0:
        pytest.skip(f"the npm registry cannot be reached: {installed.stderr.strip()[-200:]}")
    (project / "client.js").write_text(script)
    return project


async def test_the_node_client_does_not_repeat_what_was_done(tmp_path: Path) -> None:
    """With its default of two repetitions, a turn that fails after a tool has run is asked for once: the tool has run once."""
    project = await trio.to_thread.run_sync(project_of, tmp_path, REPEATING)
    async with world(tool_then(503)) as served:
        ran = await trio.run_process(
            ["node", "client.js"],
            cwd=project,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env={**os.environ, "BASE": f"{served.gateway.url}/v1", "KEY": ADMIN_KEY},
        )
        assert ran.returncode == 0, ran.stderr.decode()
        assert served.ran == ["once"]


def test_the_node_client(tmp_path: Path) -> None:
    """Chat, streams, responses with accumulated output, chaining, deletion, models, error classes and the automatic retry."""
    project = project_of(tmp_path, SCRIPT)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text("[limits]\nconcurrent_turns = 1\n")
    with server_process(home) as server:
        ran = subprocess.run(
            ["node", "client.js"],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "BASE": f"{server.url}/v1", "KEY": server.key},
        )
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout) == [
            "chat",
            "chat stream",
            "responses",
            "responses stream",
            "models",
            "errors",
            "retry",
        ]
