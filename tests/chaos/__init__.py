"""Chaos: nodes, their database and the network between them fail under load, and every promise is judged afterwards. `make test-chaos`."""
