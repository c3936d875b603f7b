"""``/metrics``: the figures of workers, queues and this gateway, for Prometheus."""
