"""Scheduled jobs: schedules, the scheduler, and the interface that runs each slot as a one-shot session."""
