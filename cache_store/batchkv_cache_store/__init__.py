"""Content-addressed store of packed KV blocks."""
