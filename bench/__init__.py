"""Benchmarks: each module is run with `python -m bench.<name>`; its docstring says what it measures."""
