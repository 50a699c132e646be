"""`python -m hermes_trio` is `hermes-trio`."""

import sys
from pathlib import Path

# `-m` puts the working directory first on the path, and a command may have written a module there that would shadow a real one.
if not sys.flags.safe_path and sys.path[0] == str(Path.cwd()) != str(Path(__file__).parent.parent):
    del sys.path[0]

from hermes_trio.cli import main

main()
