"""``batchkv top``: batches and workers in a terminal, live."""
