"""The model-tool loop, the models it talks to, and the approvals it asks for."""
