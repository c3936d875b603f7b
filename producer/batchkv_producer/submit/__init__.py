"""From checked rows to a batch in the queue."""
