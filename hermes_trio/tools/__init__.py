"""The tools of an agent: the registry, the terminal, processes, delegation, and MCP."""
