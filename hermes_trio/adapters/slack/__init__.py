"""Slack: Socket Mode and Events API, the Web API client and the adapter that joins them."""
