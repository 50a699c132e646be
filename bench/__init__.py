"""Benchmarks: each module is run with `python -m bench.<name>` and says what it measures."""
