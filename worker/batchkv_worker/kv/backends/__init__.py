"""What depends on the device: its switches, its kernels, how long it takes."""
