"""What is decided, measured and checked once, before any job."""
