"""What a worker counts: for its record on the server, and for samples of its queues. No MLX."""
