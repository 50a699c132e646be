"""The store on SQLite: one module a table, one writer task with group commit, readers beside it."""
