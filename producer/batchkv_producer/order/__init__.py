"""The order in which a batch is queued: rows with a common prefix are neighbours."""
