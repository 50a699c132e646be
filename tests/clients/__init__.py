"""Unmodified client libraries against the real server: each in an environment of its own, over a socket."""
