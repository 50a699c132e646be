"""The composition: puts store, runtime, agent, tools, adapters and the HTTP server together."""
