"""The chat in the browser."""
