"""Files: their bytes in a folder, their facts in Redis."""
