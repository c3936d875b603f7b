"""What the engine's thread is told, and the thread that prepares rows ahead of it. No MLX."""
