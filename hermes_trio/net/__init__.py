"""Clients for the network, on Trio: dialling through proxies, HTTP/1.1 with a connection pool, server-sent events, WebSocket."""
