"""Several models for one worker: a host, with one process for each model that it holds. No MLX.

``groups`` decides which models fit into memory together, ``choice`` which model to load next, both
without effects. ``view`` reads the queues and the other workers. ``holding`` is the processes,
``host`` the loop, ``start`` the checks before it.
"""
