"""Start a run, follow its events over lost connections, answer what it asks, and stop it with a receipt on Ctrl-C.

    HERMES_URL=http://127.0.0.1:8642 HERMES_KEY=... python run_client.py "!run rm -rf ./build"

A run belongs to the server: if this program is killed, `--follow RUN_ID` goes on where it was. Events carry ids, so a reader that comes back with the last id
that it saw misses nothing and sees nothing twice.
"""
# ruff: noqa: T201

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

TERMINAL = {"run.completed", "run.failed", "run.cancelled"}
RETRY_SECONDS = 1.0


def connect() -> httpx2.Client:
    """A client for the server that the environment names."""
    home = Path(os.environ.get("HERMES_HOME", "~/.hermes-trio")).expanduser()
    key = os.environ.get("HERMES_KEY") or (home / "api_server.key").read_text().strip()
    url = os.environ.get("HERMES_URL", "http://127.0.0.1:8642")
    # A silent stream gets a comment every 15 seconds: a minute without a byte means that the connection is gone.
    timeout = httpx2.Timeout(10.0, read=60.0)
    return httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=timeout)


def start(client: httpx2.Client, text: str) -> str:
    """Start a run. With the idempotency key the request can be repeated, and starts one run all the same."""
    once = {"Idempotency-Key": str(uuid.uuid4())}
    while True:
        try:
            answer = client.post("/v1/runs", json={"input": text}, headers=once)
        except httpx2.TransportError as error:
            print(f"({type(error).__name__}; trying again)", file=sys.stderr)
        else:
            if answer.status_code not in (429, 503):
                answer.raise_for_status()
                return answer.json()["run_id"]
        time.sleep(RETRY_SECONDS)


def events(client: httpx2.Client, run_id: str) -> Iterator[dict[str, Any]]:
    """All events of a run, to its end, however often the connection is lost meanwhile."""
    last = ""
    while True:
        headers = {"Last-Event-ID": last} if last else {}
        try:
            with client.stream("GET", f"/v1/runs/{run_id}/events", headers=headers) as stream:
                stream.raise_for_status()
                for line in stream.iter_lines():
                    if line.startswith("id: "):
                        last = line[4:]
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        yield event
                        if event["event"] in TERMINAL:
                            return
        except httpx2.TransportError as error:
            print(f"({type(error).__name__}; resuming behind {last or 'the beginning'})", file=sys.stderr)
        time.sleep(RETRY_SECONDS)


def answer(client: httpx2.Client, run_id: str, request: dict[str, Any], choice: str) -> None:
    """Answer a request for approval: with `choice`, or with what is typed."""
    print(f"\n{request['command']}\n  {request['description']}; answer with {', '.join(request['choices'])}")
    choice = choice or input("> ").strip()
    body = {"choice": choice, "approval_id": request["approval_id"]}
    told = client.post(f"/v1/runs/{run_id}/approval", json=body)
    if told.is_error:
        # Too late, or not a choice: the run goes on, and says what became of it.
        print(told.json()["error"]["message"], file=sys.stderr)


def main() -> int:
    """Exit code: 0 completed, 1 failed, 130 stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("input", nargs="?", default="!run echo hello from a run")
    parser.add_argument("--follow", metavar="RUN_ID", help="follow a run that exists instead of starting one")
    parser.add_argument("--approve", default="", metavar="CHOICE", help="answer every request with this choice")
    given = parser.parse_args()
    with connect() as client:
        run_id = given.follow or start(client, given.input)
        print(run_id)
        try:
            for event in events(client, run_id):
                match event["event"]:
                    case "message.delta":
                        print(event["delta"], end="", flush=True)
                    case "tool.started":
                        print(f"[{event['tool']}: {event['preview']}]")
                    case "approval.request":
                        answer(client, run_id, event, given.approve)
                    case "run.completed":
                        print()
                        return 0
                    case "run.failed" | "run.cancelled" as name:
                        print(f"\n{name}: {event.get('error') or event.get('cause')}", file=sys.stderr)
                        return 1
                    case _:
                        pass
        except KeyboardInterrupt:
            receipt = client.post(f"/v1/runs/{run_id}/stop?wait=true").json()["receipt"]
            for line in receipt["lines"]:
                print(f"  {line['kind']} {line['name']}: {line['how']} after {line['milliseconds']:.0f} ms")
            print("everything has ended" if receipt["ok"] else f"still there: {receipt['remaining']}")
            return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
