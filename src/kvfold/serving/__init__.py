"""Serving a model to many clients at once: the engine, and the HTTP server around it."""
