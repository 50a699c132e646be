"""Scheduled jobs: schedules, the clock that fires them, and the adapter that runs each slot as a one-shot session."""
