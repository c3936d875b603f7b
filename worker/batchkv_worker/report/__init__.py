"""The parts of ``batchkv kv-report``: measurements of KV schemes, and their tables."""
