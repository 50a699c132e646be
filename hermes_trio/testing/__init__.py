"""Fakes, fixtures and checks for programs that embed the runtime, and for our own tests."""
