"""``batchkv cache``: what is stored where, whether it is whole, and how to be rid of it."""

from batchkv_cache_store.cli.group import cache

__all__ = ["cache"]
