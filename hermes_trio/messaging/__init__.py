"""The engine of all delivering adapters: inbound messages, access control, replies."""
