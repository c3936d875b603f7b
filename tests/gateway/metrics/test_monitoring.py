"""The dashboard, the alerts and the page of metrics name metrics that the gateway has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchkv_gateway.metrics.table import PARTS, Kind
from gateway.metrics.promtool import promtool

REPOSITORY = Path(__file__).resolve().parents[3]
ALERTS = REPOSITORY / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((REPOSITORY / "deploy" / "grafana" / "batchkv.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
_NAME = re.compile(r"\bbatchkv_\w+")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
_MATCHED = re.compile(r"\{([^}]*)\}")


def names_of_metrics() -> dict[str, set[str]]:
    """Each name that a query may have, with its labels."""
    found: dict[str, set[str]] = {}
    for labels, metrics in PARTS.values():
        for metric in metrics:
            own = {*labels, *metric.labels}
            if metric.kind is Kind.HISTOGRAM:
                found[f"{metric.name}_bucket"] = {*own, "le"}
                found[f"{metric.name}_sum"] = found[f"{metric.name}_count"] = own
            else:
                found[metric.shown] = own
    return found


def queries() -> Iterator[str]:
    """All queries of the dashboard and of the alerts."""
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_every_query_names_metrics_that_exist() -> None:
    """Each name and each label of a query is in the table of metrics."""
    known = names_of_metrics()
    found = list(queries())
    assert len(found) > 40
    for query in found:
        names = set(_NAME.findall(query))
        assert names <= known.keys(), query
        labels = {"instance", "job"}.union(*(known[name] for name in names))
        grouped = {one.strip() for part in _GROUPED.findall(query) for one in part.split(",")}
        matched = {one for part in _MATCHED.findall(query) for one in re.findall(r"(\w+)=", part)}
        assert grouped | matched <= labels, query


def test_every_panel_is_labelled() -> None:
    """A panel has a title, a sentence, a unit and a legend, and covers no other."""
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        at = panel["gridPos"]
        own = {
            (at["x"] + column, at["y"] + line)
            for column in range(at["w"])
            for line in range(at["h"])
        }
        assert not own & places and at["x"] + at["w"] <= 24, panel["title"]
        places |= own
    for panel in PANELS:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_page_is_what_the_table_says() -> None:
    """``python tools/metrics_page.py`` has been run since the table was changed."""
    command = [sys.executable, str(REPOSITORY / "tools" / "metrics_page.py"), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["alerts.yml", "prometheus.yml"])
def test_files_for_prometheus_are_well(name: str) -> None:
    """Prometheus reads its configuration and its rules."""
    kind = "rules" if name == "alerts.yml" else "config"
    promtool("check", kind, str(ALERTS.with_name(name)))


def test_alerts_fire_when_they_should() -> None:
    """Each case of ``alerts_test.yml``: series, and the alerts that follow from them."""
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))


def test_queries_of_the_dashboard_are_well(tmp_path: Path) -> None:
    """Prometheus reads each query, with Grafana's variables filled in."""
    rules: list[dict[str, Any]] = []
    for query in queries():
        filled = query.replace("$__rate_interval", "1m")
        rules.append({"record": f"panel:n{len(rules)}", "expr": re.sub(r"\$\w+", ".*", filled)})
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))
