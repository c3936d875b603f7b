"""Loads a model, and finds its dtype, context, caches and defaults for the engine."""
