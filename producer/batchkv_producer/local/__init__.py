"""``batchkv run`` and ``ask``: a batch with workers on this machine."""
