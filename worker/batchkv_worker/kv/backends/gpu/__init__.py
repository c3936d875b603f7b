"""Changes that help on any GPU, such as fewer kernels."""
