"""``batchkv cache verify``: reads blocks in full and reports damaged ones."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click

from batchkv_cache_store.blocks.seal import Sealer
from batchkv_cache_store.cli.table import Column, print_table, without_middle
from batchkv_cache_store.cli.text import Size, count, print_json, say
from batchkv_cache_store.cli.tiers import EXIT_DAMAGE, Place, cache_options, open_cache, sealer
from batchkv_cache_store.upkeep.check import Verdict, check_all, parse_sample, sample

PROGRESS_SECONDS = 5.0


@dataclass(slots=True)
class _Report:
    """The verdicts of one tier."""

    place: Place
    num_whole: int = 0
    num_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    damaged: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.num_bytes += verdict.entry.num_bytes
        if verdict.reason is None:
            self.num_whole += 1
            return
        self.reasons[verdict.reason] += 1
        if verdict.is_damaged:
            self.damaged.append(verdict)

    @property
    def num_unchecked(self) -> int:
        return sum(self.reasons.values()) - len(self.damaged)

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": str(self.place),
            "num_whole": self.num_whole,
            "num_damaged": len(self.damaged),
            "num_unchecked": self.num_unchecked,
            "num_bytes": self.num_bytes,
            "reasons": dict(sorted(self.reasons.items())),
            "damaged": [
                {"name": v.entry.name, "reason": v.reason, "detail": v.detail}
                for v in self.damaged
            ],
        }  # fmt: skip


@click.command()
@cache_options
@click.option("--sample", "size", metavar="N|SHARE",
              help="Read only so many blocks, chosen at random: 500, or 5%.")  # fmt: skip
@click.option("--repair", is_flag=True,
              help="Set damaged blocks aside. Workers will compute them again.")  # fmt: skip
def verify(
    cache_text: str | None, only: str | None, as_json: bool, size: str | None, repair: bool
) -> None:
    """Read blocks in full and check them. The exit code is 1 if one is damaged.

    Blocks that cannot be checked (signed with a secret that is not set here, or of another version
    of the format) are counted and stay. A disk tier moves a block that is set aside to its folder
    aside/. Other tiers delete it.

    \b
    Examples:
      batchkv cache verify
      batchkv cache verify --sample 5% --tier redis
      batchkv cache verify --repair
    """
    own = sealer()
    with open_cache(cache_text, only) as cache:
        reports = []
        for place in cache.places:
            report = _Report(place)
            with cache.reporting(place):
                _verify(report, size, own)
                for verdict in report.damaged if repair else ():
                    place.tier.set_aside(verdict.entry.name)
            reports.append(report)
        if any(report.damaged for report in reports):
            cache.exit_code = cache.exit_code or EXIT_DAMAGE
        if as_json:
            print_json({"tiers": [r.as_json() for r in reports], "is_repaired": repair})
        else:
            _print(reports, repair)


def _verify(report: _Report, size: str | None, own: Sealer) -> None:
    tier = report.place.tier
    entries = tier.iter_names()
    told_at = time.monotonic()
    for verdict in check_all(tier, sample(entries, _size(size)) if size else entries, own):
        report.add(verdict)
        if sys.stderr.isatty() and time.monotonic() - told_at > PROGRESS_SECONDS:
            told_at = time.monotonic()
            number = report.num_whole + sum(report.reasons.values())
            say(f"{report.place}: {count(number, 'block')} so far")


def _size(text: str) -> int | float:
    try:
        return parse_sample(text)
    except ValueError as fault:
        raise click.ClickException(f"--sample {fault}") from None


def _print(reports: list[_Report], is_repaired: bool) -> None:
    reasons = [
        " ".join(f"{reason}={number}" for reason, number in sorted(report.reasons.items()))
        for report in reports
    ]
    print_table(
        [
            Column("WHOLE", [report.num_whole for report in reports]),
            Column("DAMAGED", [len(report.damaged) for report in reports]),
            Column("UNCHECKED", [report.num_unchecked for report in reports]),
            Column("BYTES", [Size(report.num_bytes) for report in reports]),
            Column("TIER", [str(report.place) for report in reports], without_middle, 8),
            Column("REASONS", reasons, without_middle, 16, if_any=True),
        ]
    )
    damaged = [(report, verdict) for report in reports for verdict in report.damaged]
    for report, verdict in damaged:
        say(f"{verdict.entry.name} in {report.place} is damaged: {verdict.detail}")
    if damaged:
        done = "and set aside" if is_repaired else "and not changed: --repair sets them aside"
        say(f"{count(len(damaged), 'block')} damaged {done}")
