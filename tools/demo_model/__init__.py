"""Trains the model of ``batchkv_worker.demo``; no part of the wheel."""
