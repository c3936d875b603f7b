"""Batches: their states in Redis, and the steps that bring each from one state to the next."""
