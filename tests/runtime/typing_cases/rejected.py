from hermes_trio import JobSpec, StatelessTurn, Supervisor


async def watch(supervisor: Supervisor, job: JobSpec, turn: StatelessTurn) -> None:
    await supervisor.start_watched(job, turn.owner, turn.channel)
