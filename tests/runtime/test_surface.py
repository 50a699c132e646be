"""The public names, and the order of the layers' promises that a reader relies on."""

import subprocess
import sys

import hermes_trio


def test_public_names_are_exactly_these():
    """An embedder imports from `hermes_trio`; a name added or lost is a decision, not an accident."""
    assert set(hermes_trio.__all__) == {
        "Agent", "AgentFailed", "Budget", "BudgetExhausted", "CancelCause", "Cause", "CompletionChannel", "Inbox",
        "DeliveringTurn", "DrainReport", "Draining", "Interface", "InboxRow", "InvalidContext", "Job", "JobRefused",
        "JobSpec", "JobState", "MailboxFull", "Message", "NewMessage", "NoRuntime", "Node", "NoticeKind",
        "NewReply", "Outcome", "Owner", "Reply", "Run", "RunStatus", "Runtime", "RuntimeClosed", "RuntimeProblem",
        "RuntimeStore", "SessionContext", "RuntimeSettings", "StatelessEntry", "StatelessTurn", "StopReceipt", "Supervisor",
        "TooBusy", "Tree", "Turn", "TurnInput", "TurnState", "UnknownJob", "Usage", "__version__",
        "AgentSettings", "AsyncioRuntime", "ModelAgent", "Store", "Tracing", "open_store", "trio_agent",
        "async_delivery_supported", "asyncio_agent", "bind", "current_context", "current_runtime", "current_turn",
        "get_session_env", "sync_agent", "waiting", "working",
    }  # fmt: skip


def test_every_public_name_exists_and_is_documented():
    """Each public object says what it is."""
    for name in hermes_trio.__all__:
        value = getattr(hermes_trio, name)
        assert name == "__version__" or getattr(value, "__doc__", None), name


def test_importing_the_package_loads_no_server_and_no_trio():
    """A program pays for what it uses: the package's names are loaded one by one, and the runtime brings neither server, adapter nor asyncio."""
    loaded = "import sys; print(*[name for name in sys.modules if name.split('.')[0] in NAMES or name in NAMES])"
    names = ("trio", "asyncio", "quart", "hypercorn", "quart_trio", "hermes_trio.adapters", "hermes_trio.http")
    assert _run(f"import hermes_trio, hermes_trio.testing; NAMES = {names}; {loaded}") == ""
    rest = names[1:]
    assert _run(f"from hermes_trio import Runtime, Turn; NAMES = {rest}; {loaded}") == ""


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()
