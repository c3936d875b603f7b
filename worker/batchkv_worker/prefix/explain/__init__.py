"""``batchkv cache why``: why a prompt was computed and not taken from the shared cache."""
