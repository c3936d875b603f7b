"""The checks of ``batchkv doctor`` that need MLX, a model or the tiers of the cache."""
