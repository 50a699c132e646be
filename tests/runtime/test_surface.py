"""The public names, and the order of the layers' promises that a reader relies on."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hermes_trio
import hermes_trio.testing


def test_public_names_are_exactly_these():
    """An embedder imports from `hermes_trio`; a name added or lost is a decision, not an accident."""
    assert set(hermes_trio.__all__) == {
        "Agent", "AgentFailed", "Budget", "BudgetExhausted", "CancelCause", "Cause", "CompletionChannel", "Inbox",
        "DeliveringTurn", "DrainReport", "Draining", "Interface", "InboxRow", "InvalidContext", "Job", "JobRefused",
        "JobSpec", "JobState", "MailboxFull", "Message", "NewMessage", "NoRuntime", "Node", "NoticeKind",
        "NewReply", "Outcome", "Owner", "Reply", "Run", "RunStatus", "Runtime", "RuntimeClosed", "RuntimeProblem",
        "RuntimeStore", "SessionContext", "RuntimeSettings", "StatelessEntry", "StatelessTurn", "StopReceipt", "Supervisor",
        "TooBusy", "Tree", "Turn", "TurnHooks", "TurnInput", "TurnSpec", "TurnState", "UnknownJob", "Usage",
        "__version__",
        "AgentSettings", "AsyncioRuntime", "ModelAgent", "Store", "Tracing", "open_store", "trio_agent",
        "async_delivery_supported", "asyncio_agent", "bind", "current_context", "current_runtime", "current_turn",
        "get_session_env", "sync_agent", "waiting", "working",
        "Adapter", "Finished", "Incoming", "Model", "ModelError", "ModelErrorKind", "ModelRequest", "ModelStream",
        "Outgoing", "Platform", "PlatformError", "PlatformErrorKind", "PlatformSettings", "SendResult", "Source",
        "TextDelta", "Tool", "ToolCallReady", "ToolSpec", "Tools", "split_settings", "tool",
    }  # fmt: skip


def test_public_names_of_testing_are_exactly_these():
    """A test suite imports from `hermes_trio.testing`."""
    assert set(hermes_trio.testing.__all__) == {
        "AdapterBench", "AdapterContract", "Delivered", "FakeAdapter", "GatewayOptions",
        "GatewayStoreContract", "InjectedFault", "MemoryPlatform", "ModelServer",
        "OpenTestGateway",
        "RecordingHub", "ScriptedAgent", "ScriptedAnswer", "ScriptedRefusal", "Sent", "StoreContract", "StoreFaultKind",
        "StoreFaults", "eventually",
        "fake_job",
        "open_test_gateway",
    }  # fmt: skip


@pytest.mark.parametrize("package", [hermes_trio, hermes_trio.testing], ids=["hermes_trio", "testing"])
def test_every_public_name_exists_and_is_documented(package: Any):
    """Each public object says what it is; the list for type checkers, the lazy one and `__all__` agree."""
    for name in package.__all__:
        value = getattr(package, name)
        assert name == "__version__" or getattr(value, "__doc__", None), name
    assert dir(package) == sorted(package.__all__)
    tree = ast.parse(Path(package.__file__).read_text())
    (static,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name for node in static.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(package.__all__) - {"__version__"}


def test_importing_the_package_loads_no_server_and_no_trio():
    """A program pays for what it uses: the package's names are loaded one by one, and the runtime brings neither server, adapter nor asyncio."""
    loaded = "import sys; print(*[name for name in sys.modules if name.split('.')[0] in NAMES or name in NAMES])"
    names = ("trio", "asyncio", "quart", "hypercorn", "quart_trio", "hermes_trio.adapters", "hermes_trio.http")
    assert _run(f"import hermes_trio, hermes_trio.testing; NAMES = {names}; {loaded}") == ""
    rest = names[1:]
    assert _run(f"from hermes_trio import Runtime, Turn; NAMES = {rest}; {loaded}") == ""


OPEN_A_GATEWAY = """
import sys, trio
from pathlib import Path
from hermes_trio.config import load_config
from hermes_trio.gateway.api import open_api_gateway
from hermes_trio.http.auth import AdminKey

async def main():
    async with open_api_gateway(load_config({}, home=Path(sys.argv[1])), AdminKey("k" * 24), in_memory=True):
        print(*sorted(set(sys.argv[2:]) & set(sys.modules)))

trio.run(main)
"""


def test_an_open_gateway_has_not_loaded_what_only_some_configurations_use(tmp_path: Path):
    """The metadata of packages is for plugins and exporters, time zones for schedules and daily resets; tests, PostgreSQL and tracing are for those who ask."""
    unused = ("importlib.metadata", "importlib.resources", "zoneinfo", "email", "opentelemetry")
    ours = ("hermes_trio.store.postgres", "hermes_trio.tracing.tracer", "hermes_trio.testing", "hermes_trio.guest")
    assert _run(OPEN_A_GATEWAY, str(tmp_path), "trio", *unused, *ours) == "trio"


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
