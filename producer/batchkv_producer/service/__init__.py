"""``batchkv service``: workers and servers under launchd (macOS) or systemd (Linux)."""
