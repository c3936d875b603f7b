"""Kernels for decode attention on packed keys and values, written once for all devices."""
