"""The `terminal` and `process` tools: commands, background processes, the state of a session's shell, watched output."""
