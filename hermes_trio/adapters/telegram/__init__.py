"""Telegram: the Bot API client, its updates and the adapter."""
