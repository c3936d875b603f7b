"""API keys: Redis has their digests only."""
