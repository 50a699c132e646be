"""Thin clients of the chat platforms' own protocols: bytes on the wire, typed values, one error type.

They know nothing of sessions, turns or delivery; the adapters build those on top. Each client is entered with
`async with` by its owner, which also ends it.
"""
