"""A cache seen from outside: what it holds, whether it is whole, what to remove."""
