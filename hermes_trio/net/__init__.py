"""Clients for the network, on Trio: dialling, HTTP/1.1 with a connection pool, server-sent events."""
