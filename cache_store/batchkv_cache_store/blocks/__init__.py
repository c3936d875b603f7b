"""The format of stored blocks: bytes, names, seals."""
