"""Talk to a running server with the official OpenAI client: chat, streaming, and responses that continue each other.

Run it, with the openai package installed:

    HERMES_URL=http://127.0.0.1:8642 HERMES_KEY=... python openai_client.py
"""
# ruff: noqa: T201

import os
from pathlib import Path

from openai import OpenAI

url = os.environ.get("HERMES_URL", "http://127.0.0.1:8642")
home = Path(os.environ.get("HERMES_HOME", "~/.hermes-trio")).expanduser()
key = os.environ.get("HERMES_KEY") or (home / "api_server.key").read_text().strip()
client = OpenAI(base_url=f"{url}/v1", api_key=key)

print("models:", ", ".join(model.id for model in client.models.list()))

answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}])
print("chat:", answer.choices[0].message.content)

# Tools run on the server; the demo model uses one when it is told to.
stream = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "!run echo from a tool"}],
    stream=True,
    stream_options={"include_usage": True},
)
print("stream: ", end="")
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        print(f"\nusage: {chunk.usage.total_tokens} tokens")

first = client.responses.create(model="demo", input="My name is Ada.")
second = client.responses.create(model="demo", input="What is my name?", previous_response_id=first.id)
print("responses:", first.output_text, "|", second.output_text)
client.responses.delete(first.id)
