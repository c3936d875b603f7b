"""Tells the URLs of ``serve --webhook`` that a batch is over."""
