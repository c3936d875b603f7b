"""Between Redis and the engine: takes jobs, keeps their leases, stores results. No MLX here."""
