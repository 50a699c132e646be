"""The terminal as a platform: `hermes-trio chat` and `hermes-trio run`."""
