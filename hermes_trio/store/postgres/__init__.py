"""The store on PostgreSQL: the same verbs as on SQLite, for several nodes on one database. Loaded only where an address names one."""
