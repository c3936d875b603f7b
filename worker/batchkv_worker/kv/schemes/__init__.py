"""KV schemes: how keys and values are packed."""
