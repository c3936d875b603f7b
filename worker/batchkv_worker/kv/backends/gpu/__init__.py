"""What any GPU gains from, as fewer kernels."""
