"""`python -m hermes_trio` is `hermes-trio`."""

from hermes_trio.cli import main

main()
