"""hermes-trio."""
