"""The composition: the one place where store, runtime, agent, tools, adapters and the HTTP server are put together."""
