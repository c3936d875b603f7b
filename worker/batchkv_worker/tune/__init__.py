"""``batchkv tune``: measures anew what a worker chooses, shows it and keeps it."""
