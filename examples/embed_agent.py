"""An agent of your own in your own program: turns, background work that reports back, a stop with a receipt. No server, no model.

Run it:

    python embed_agent.py
"""
# ruff: noqa: T201

import trio

from hermes_trio import (
    DeliveringTurn,
    Job,
    JobSpec,
    JobState,
    Runtime,
    SessionContext,
    Turn,
    TurnHooks,
    get_session_env,
)


async def build(job: Job) -> JobState:
    """Work that outlives the turn which starts it. The supervisor owns it, and ends it with the program."""
    job.started()
    await trio.sleep(0.2)
    job.text = "12 files built"
    return JobState.EXITED


async def agent(turn: Turn) -> str:
    """What answers every turn. It runs in the turn's own nursery, with the session's identity bound."""
    who = get_session_env("HERMES_SESSION_USER_NAME", "somebody")
    if turn.input.text == "build" and isinstance(turn, DeliveringTurn):
        spec = JobSpec(kind="build", title="the build", run=build)
        await turn.watch_job(spec)
        return f"{who}, I will tell you when it is built"
    if turn.input.text == "think":
        await trio.sleep_forever()
    return f"{who} said: {turn.input.text}"


async def main() -> None:
    """A conversation, a job, and a stop."""
    async with Runtime(agent=agent) as runtime:
        ada = SessionContext(session_id="ada", user_name="Ada")
        print((await runtime.run_turn("hello", ada)).text)

        print((await runtime.run_turn("build", ada)).text)
        print(runtime.tree.render())
        async for notice in runtime.completions():
            print("told:", notice.text)
            break

        async with trio.open_nursery() as nursery:
            started = trio.Event()
            turns: list[Turn] = []

            def note(turn: Turn) -> None:
                turns.append(turn)
                started.set()

            async def think() -> None:
                outcome = await runtime.run_turn("think", ada, hooks=TurnHooks(on_start=note))
                print("the turn ended as", outcome.state.value)

            nursery.start_soon(think)
            await started.wait()
            receipt = await turns[0].stop()
            print("stopped, and nothing of it runs:", receipt.ok)


trio.run(main)
