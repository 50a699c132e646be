"""Scopes, turns, lanes, jobs and channels: the task tree. Knows nothing of HTTP, SQL, models, platforms or processes."""
