"""Places where blocks are kept. ``base`` has the contract; each tier is a module of its own."""
