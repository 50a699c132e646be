"""What can go wrong between a caller and the warden. Everything here is a `WardenError`."""


class WardenError(Exception):
    """The process layer could not do what it was asked."""


class UnsupportedPlatform(WardenError):
    """Sub-reapers, and with them the promise that no process is lost, exist only on Linux."""


class WardenClosed(WardenError):
    """The scope that owns the processes is closing or closed, and starts no more."""


class SpawnFailed(WardenError):
    """The command was not started: the text says at which step, with what, and why."""


class NotTaken(SpawnFailed):
    """The warden died before it took the command: nothing was started, and another warden may try."""


class TooManyProcesses(WardenError):
    """The limit of running processes is reached; nothing was started."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the limit of {limit} running processes is reached: wait for one to end, or kill one, then try again"
        )
        self.limit = limit


class StdinClosed(WardenError):
    """The process has no standard input that could be written to."""
