"""The parts of ``batchkv kv-report``: what is measured, and how it is shown."""
