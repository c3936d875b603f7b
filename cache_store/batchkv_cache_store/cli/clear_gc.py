"""``batchkv cache clear`` and ``gc``: delete blocks, and never foreign files."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import click

from batchkv_cache_store.cli.table import Column, print_table, without_middle
from batchkv_cache_store.cli.text import Size, count, print_json, say
from batchkv_cache_store.cli.tiers import (
    OpenCache,
    Place,
    cache_options,
    checked_digits,
    only_one,
    open_cache,
)
from batchkv_cache_store.tiers.base import Swept
from batchkv_cache_store.upkeep.collect import Choice, Rules, Why, choose, remove


@click.command()
@cache_options
@click.option("--namespace", metavar="DIGITS", help="Delete only blocks of this namespace. Its "
              "first digits are enough.")  # fmt: skip
@click.option("--pinned", "has_pinned", is_flag=True, help="Delete pinned blocks, too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    namespace: str | None,
    has_pinned: bool,
    yes: bool,
) -> None:
    """Delete the blocks of all tiers. Files of other programs stay.

    Workers compute missing blocks again, so only time is lost.

    \b
    Examples:
      batchkv cache clear --tier disk
      batchkv cache clear --namespace 3f2a9c51 --yes
    """
    digits = None if namespace is None else checked_digits(namespace)
    with open_cache(cache_text, only) as cache:
        rules = Rules(
            removes=lambda other: digits is None or other.hex().startswith(digits),
            has_unreadable=digits is None,
            has_other_formats=digits is None,
            has_pinned=has_pinned,
        )
        plans = _plan(cache, rules)
        if digits is not None:
            _check_namespaces([digits], _seen(plans))
        num_names = sum(len(plan.choice.names) for plan in plans)
        if num_names and not yes:
            _ask(plans)
        for plan in plans:
            _carry_out(cache, plan)
        _print(plans, as_json, is_dry_run=False)


@click.command()
@cache_options
@click.option("--namespace", "gone", multiple=True, metavar="DIGITS",
              help="Delete blocks of this namespace, too (may be repeated).")  # fmt: skip
@click.option("--other-than", "kept", multiple=True, metavar="DIGITS",
              help="Delete blocks of all other namespaces, too (may be repeated).")  # fmt: skip
@click.option("--other-formats", is_flag=True,
              help="Delete blocks of other versions of the format, too.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Count the blocks, and delete none.")
def gc(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    gone: tuple[str, ...],
    kept: tuple[str, ...],
    other_formats: bool,
    dry_run: bool,
) -> None:
    """Remove files that no worker will use.

    These are damaged blocks that were set aside, files of writers that died, and blocks that cannot
    be read. Blocks of other models, schemes and formats are removed only with a flag. Pinned blocks
    stay.

    \b
    Examples:
      batchkv cache gc --dry-run
      batchkv cache gc --other-than 3f2a9c51
    """
    if gone and kept:
        raise click.UsageError("give --namespace or --other-than, not both")
    firsts = [checked_digits(text) for text in gone or kept]

    def removes(namespace: bytes) -> bool:
        is_named = any(namespace.hex().startswith(digits) for digits in firsts)
        return is_named if not kept else not is_named

    with open_cache(cache_text, only) as cache:
        plans = _plan(cache, Rules(removes, has_other_formats=other_formats))
        if cache.failed and firsts:
            # The namespace may be in that tier only.
            raise click.ClickException("a tier does not answer, so nothing was removed")
        _check_namespaces(firsts, _seen(plans))
        for plan in plans:
            with cache.reporting(plan.place):
                plan.swept = plan.place.tier.sweep(is_dry_run=dry_run)
            if not dry_run:
                _carry_out(cache, plan)
        _print(plans, as_json, is_dry_run=dry_run)


@dataclass(slots=True)
class _Plan:
    """The blocks and files to remove from one tier."""

    place: Place
    choice: Choice
    seen: set[bytes]
    swept: Swept = field(default_factory=Swept)

    @property
    def num_bytes(self) -> int:
        return self.choice.num_bytes + self.swept.num_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": str(self.place),
            "num_chosen": len(self.choice.names),
            "num_removed": self.choice.num_removed,
            "num_bytes": self.num_bytes,
            "num_pinned": self.choice.num_pinned,
            "num_aside": self.swept.num_aside,
            "num_stale": self.swept.num_stale,
            "reasons": {str(why): self.choice.counts[why] for why in Why},
        }


def _plan(cache: OpenCache, rules: Rules) -> list[_Plan]:
    plans = []
    for place in cache.places:
        with cache.reporting(place):
            seen: set[bytes] = set()
            plans.append(_Plan(place, choose(place.tier, rules, seen), seen))
    return plans


def _seen(plans: Sequence[_Plan]) -> set[bytes]:
    return set().union(*(plan.seen for plan in plans))


def _check_namespaces(firsts: Sequence[str], seen: Set[bytes]) -> None:
    """Each of the digits must match exactly one namespace, so that a typo removes no other."""
    for digits in firsts:
        only_one(digits, [each.hex() for each in seen if each.hex().startswith(digits)])


def _ask(plans: Sequence[_Plan]) -> None:
    what = " and ".join(
        f"{count(len(plan.choice.names), 'block')} ({Size(plan.num_bytes).shown}) from {plan.place}"
        for plan in plans
        if plan.choice.names
    )
    try:
        is_sure = click.confirm(f"Delete {what}?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        is_sure = False  # there is no terminal to answer from
    if not is_sure:
        raise click.ClickException("nothing was deleted: answer y, or give --yes")


def _carry_out(cache: OpenCache, plan: _Plan) -> None:
    with cache.reporting(plan.place):
        remove(plan.place.tier, plan.choice)


def _print(plans: Sequence[_Plan], as_json: bool, *, is_dry_run: bool) -> None:
    if as_json:
        print_json({"tiers": [plan.as_json() for plan in plans], "is_rehearsal": is_dry_run})
        return
    choices, swept = [plan.choice for plan in plans], [plan.swept for plan in plans]
    if is_dry_run:
        first = Column("WOULD GO", [len(choice.names) for choice in choices])
    else:
        first = Column("DELETED", [choice.num_removed for choice in choices])
    print_table(
        [
            first,
            *(Column(str(why).upper(), [choice.counts[why] for choice in choices], if_any=True)
              for why in Why),
            Column("ASIDE", [each.num_aside for each in swept], if_any=True),
            Column("LEFT OVER", [each.num_stale for each in swept], if_any=True),
            Column("PINNED", [choice.num_pinned for choice in choices], drop=1, if_any=True),
            Column("BYTES", [Size(plan.num_bytes) for plan in plans]),
            Column("TIER", [str(plan.place) for plan in plans], without_middle, min_width=8),
        ]
    )  # fmt: skip
    if any(choice.num_pinned for choice in choices):
        say("pinned blocks stay: unpin them, or use `batchkv cache clear --pinned`")
