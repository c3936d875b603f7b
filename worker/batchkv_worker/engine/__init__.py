"""Continuous batching: chooses and computes the rows of each step, on the engine's own thread."""
