"""Write docs/metrics.md from the table of metrics (``batchkv_gateway.metrics.table``).

usage: python tools/metrics_page.py [--check]

With --check it writes nothing, and exits with 1 if the page differs from the table.
"""

from __future__ import annotations

import sys

from batchkv_gateway.metrics.table import PARTS, Metric
from page_tool import DOCS, write_or_check

PAGE = DOCS / "metrics.md"
HEAD = """\
# Metrics

<!-- Written by tools/metrics_page.py from the table of metrics. Change the table, and run it. -->

`GET /metrics` of [the gateway](gateway.md) is for Prometheus. It has the figures of all workers and
all queues of its Redis, whichever machine they are on. So one target is enough, and workers need no
port of their own.

The answer is Prometheus's text format 0.0.4, or OpenMetrics if the request asks for it.
Without any API key, everybody on the gateway's machine may read it. Then a key is needed:

<!-- not run: the key would be needed for all other blocks -->
```sh
batchkv keys add prometheus --metrics
```

[deploy/prometheus](../deploy/prometheus/prometheus.yml) has a configuration for Prometheus and
[rules for alerts](../deploy/prometheus/alerts.yml).
[deploy/grafana](../deploy/grafana/batchkv.json) has a dashboard for Grafana: import the file.

- **Workers** send their figures with each heartbeat, every 15 s. To scrape more often shows nothing
  new. Counters begin at 0 with each start of a worker. A worker whose heartbeat has lapsed is left
  out.
- **Queues** have totals of all workers that they ever had. So the work of a worker that ended
  between two scrapes counts, too. Totals begin anew after two days without a worker. A queue
  without rows, workers and totals is left out.
- **An older hub** refuses the totals, and a worker says so once. Run `deploy/hub/setup.sh` of this
  version for them.
- **Several gateways** of one Redis answer the same about workers and queues. Take `max by (worker)`
  or `max by (queue)` of them, as the dashboard does. Or scrape all but one with
  `/metrics?only=gateway`, which answers about the gateway alone.
- A histogram has `_bucket`, `_sum` and `_count`. The count of `batchkv_worker_step_seconds` is the
  number of steps.
- A label has at most 128 characters. A longer one is cut and ends with 8 digits of its hash.
"""
FOOT = """
Next: [Python](python.md)
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(part(name) for name in PARTS) + FOOT


def part(name: str) -> str:
    """The section of one part of the table."""
    labels, metrics = PARTS[name]
    words = f"Labels of each: {shown(labels)}.\n\n" if labels else ""
    lines = "".join(f"{row(metric)}\n" for metric in metrics)
    return (
        f"\n## {name}\n\n{words}| metric | type | labels | what it is |\n|---|---|---|---|\n{lines}"
    )


def row(metric: Metric) -> str:
    """One line of a table."""
    cells = (f"`{metric.shown}`", metric.kind.value, shown(metric.labels), metric.about)
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def shown(labels: tuple[str, ...]) -> str:
    """The names of labels, as code."""
    return ", ".join(f"`{label}`" for label in labels)


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], __file__, PAGE, page, __doc__))
