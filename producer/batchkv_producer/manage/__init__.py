"""Changing a batch that is in the queue: reconcile, cancel, retry, forget."""
