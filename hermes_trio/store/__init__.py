"""The durable side of the tree: verbs, each one transaction with one invariant, on SQLite."""
