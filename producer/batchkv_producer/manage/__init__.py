"""Changes batches that are on the server: cancel, retry, forget, reconcile, recount."""
