"""Faster replacements for slow operations of MLX's CPU backend."""
