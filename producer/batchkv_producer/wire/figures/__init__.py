"""The figures of workers and queues, as they are stored in Redis."""
