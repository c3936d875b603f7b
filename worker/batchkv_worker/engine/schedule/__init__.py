"""What is computed next, and what is admitted. Knows rows and memory, no tensors."""
