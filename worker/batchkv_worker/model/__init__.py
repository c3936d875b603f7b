"""Loading a model and learning what the engine must know of it."""
