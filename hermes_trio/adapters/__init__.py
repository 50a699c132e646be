"""Delivering adapters: the interfaces that can reach a conversation after its turn has ended."""
