"""Sends an event to the URLs of ``serve --webhook`` when a batch is over."""
