"""Continuous batching: what is computed in which step, on the engine's own thread."""
