"""The errors of the process layer. All of them are `WardenError`s."""


class WardenError(Exception):
    """The base of the errors of the process layer."""


class UnsupportedPlatform(WardenError):
    """Raised on systems other than Linux: only Linux has the sub-reapers that keep a process from being lost."""


class WardenClosed(WardenError):
    """Raised if the scope that owns the processes is closing or closed. Nothing was started."""


class SpawnFailed(WardenError):
    """Raised if a command was not started. The text names the step and the reason."""


class NotTaken(SpawnFailed):
    """Raised if the warden ended before it accepted the command. Nothing was started, and another warden may try."""


class TooManyProcesses(WardenError):
    """Raised if the limit of running jobs is reached. Nothing was started."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the limit of {limit} running processes is reached: wait for one to end, or kill one, then try again"
        )
        self.limit = limit


class StdinClosed(WardenError):
    """Raised if the process has no standard input that can be written to."""
