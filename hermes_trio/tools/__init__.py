"""What an agent can do: the tool registry, the terminal, processes, delegation, and MCP."""
