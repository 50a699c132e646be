"""One module a resource of the HTTP API."""
