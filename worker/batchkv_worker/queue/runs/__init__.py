"""How many jobs a worker takes, keeps and gives back. Pure: no Redis, no engine."""
