"""Reads a cache from outside: lists its contents, checks blocks, removes them."""
