"""The cache of each kind of layer, in prefill, in decode slots and in stored blocks."""
