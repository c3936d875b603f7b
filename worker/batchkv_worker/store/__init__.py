"""The worker's end of the shared store: identity, what a block holds, lookups beside decoding."""
