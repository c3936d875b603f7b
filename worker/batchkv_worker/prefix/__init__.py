"""Prefixes that were computed before: kept in memory, and shared with other workers."""
