"""``batchkv bench``: how fast this machine serves one model, each figure beside its bound."""
