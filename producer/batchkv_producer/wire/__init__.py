"""What goes over the wire: jobs, results, keys in Redis, and the moves that change them."""
