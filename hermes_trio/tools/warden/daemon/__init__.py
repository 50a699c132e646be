"""Everything that runs outside the server: the warden, its templates and keepers, and the wire between them and the server.

`main.py` is run as a file by a bare interpreter, with this folder as its import path: these modules import
only the standard library and one another, and keep the process small, because every keeper is a fork of it.
The server itself imports `wire`, `process_table`, `oom` and `prctl`, which therefore import no sibling.
"""
