"""The worker's end of the shared store: identity, lookups beside decoding, writes."""
