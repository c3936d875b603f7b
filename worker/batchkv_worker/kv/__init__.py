"""KV caches of the engine: packed schemes, prefill rows, decode slots, attention over both."""
