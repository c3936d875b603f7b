"""Trains the model of ``batchkv_worker.demo``. It is no part of the wheel."""
