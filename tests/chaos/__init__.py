"""Chaos: nodes, their database and the network between them fail under load; afterwards every guarantee is checked. `make test-chaos`."""
