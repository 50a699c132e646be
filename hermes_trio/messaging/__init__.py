"""The engine of all delivering adapters: what comes in, who may talk, what goes out."""
