"""batchkv's producer side: submit, follow, and read back batches. Never imports MLX."""
