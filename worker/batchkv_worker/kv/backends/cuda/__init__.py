"""The CUDA backend, with a kernel of its own for shared prefixes."""
