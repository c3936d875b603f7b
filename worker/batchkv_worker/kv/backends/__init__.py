"""What depends on the device: its switches, its kernels, how long it takes.

``device`` says which device it is, and has the numbers that differ between Metal, CUDA and CPU. The
folders hold kernels and layers: ``gpu`` for CUDA and Metal, ``cuda`` for CUDA alone, ``cpu`` for
CPUs. Metal has no folder: it runs MLX's own kernels, and what is in ``gpu``.
"""
