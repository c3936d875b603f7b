"""Requests that a client waits for: rows of the live lane, awaited in the event loop."""
