"""What the commands share: options, and the error whose text is for the person who typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["CommandFailed", "ConfigOption", "HomeOption"]

HomeOption = Annotated[Path | None, Parameter(help="Where state is kept; HERMES_HOME, else ~/.hermes-trio.")]
ConfigOption = Annotated[Path | None, Parameter(help="The TOML file; config.toml in the home directory if it exists.")]


class CommandFailed(Exception):
    """A command that cannot do its work; the text is for the person who typed it."""
