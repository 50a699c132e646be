"""Attacks on a real server. Each one succeeded once."""
