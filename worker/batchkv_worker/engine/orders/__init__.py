"""What the engine's thread is told, and the threads that prepare rows ahead of it. No MLX."""
