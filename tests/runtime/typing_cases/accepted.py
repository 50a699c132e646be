from hermes_trio import DeliveringTurn, JobSpec, StatelessTurn, Supervisor


async def watch(supervisor: Supervisor, job: JobSpec, turn: DeliveringTurn) -> None:
    await supervisor.start_watched(job, turn.owner, turn.channel)


async def run(supervisor: Supervisor, job: JobSpec, turn: StatelessTurn) -> None:
    await supervisor.start(job, turn.owner)
