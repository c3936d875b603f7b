"""Kernels of our own for CUDA."""
