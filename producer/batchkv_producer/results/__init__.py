"""Reading results back, and writing them to a file."""
