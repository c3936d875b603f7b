"""``batchkv cache``: lists, checks, pins and deletes blocks."""

from batchkv_cache_store.cli.group import cache

__all__ = ["cache"]
