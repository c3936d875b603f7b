"""What MLX's CPU backend is too slow at, done in other ways."""
