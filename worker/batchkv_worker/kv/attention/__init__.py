"""Attention over packed keys and values, and over prefixes that rows share."""
