"""The state of batches, jobs and workers. This room only reads."""
