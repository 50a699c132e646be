"""The stateless front end: an OpenAI-compatible server and the run API. It has no channel."""
