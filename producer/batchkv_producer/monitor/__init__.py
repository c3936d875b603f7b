"""Where batches, jobs and workers are: read from Redis, changed by nobody here."""
