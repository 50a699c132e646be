"""The model-tool loop, the port to models, and approvals."""
