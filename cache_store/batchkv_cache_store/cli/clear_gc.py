"""``batchkv cache clear`` and ``gc``: delete blocks, and never what is not ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import click

from batchkv_cache_store.cli.text import Size, count, print_json, print_table, say
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
@click.option("--namespace", metavar="DIGITS", help="Only of this one; its first digits will do.")
@click.option("--pinned", "has_pinned", is_flag=True, help="Pinned blocks too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    namespace: str | None,
    has_pinned: bool,
    yes: bool,
) -> None:
    """Delete blocks, of all tiers that are named. What is not ours stays.

    Workers compute again what they miss: nothing but time is lost.

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
              help="Blocks of this one too (may be repeated).")  # fmt: skip
@click.option("--other-than", "kept", multiple=True, metavar="DIGITS",
              help="Blocks of all but this one too (may be repeated).")  # fmt: skip
@click.option("--other-formats", is_flag=True, help="Blocks of other versions of the format too.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
def gc(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    gone: tuple[str, ...],
    kept: tuple[str, ...],
    other_formats: bool,
    dry_run: bool,
) -> None:
    """Remove what nobody will use.

    That is what was set aside as damaged, what writers that died left behind, and what cannot be
    read; blocks of other models, schemes and formats only if you say so. Pinned blocks stay.

    \b
    Examples:
      batchkv cache gc --dry-run
      batchkv cache gc --other-than 3f2a9c51
    """
    if gone and kept:
        raise click.UsageError("give --namespace or --other-than, and not both")
    firsts = [checked_digits(text) for text in gone or kept]

    def removes(namespace: bytes) -> bool:
        is_named = any(namespace.hex().startswith(digits) for digits in firsts)
        return is_named if not kept else not is_named

    with open_cache(cache_text, only) as cache:
        plans = _plan(cache, Rules(removes, has_other_formats=other_formats))
        if cache.failed and firsts:
            # It may have been that tier which knows the namespace.
            raise click.ClickException("a tier does not answer: nothing was removed")
        _check_namespaces(firsts, _seen(plans))
        for plan in plans:
            with cache.reporting(plan.place):
                plan.swept = plan.place.tier.sweep(is_dry_run=dry_run)
            if not dry_run:
                _carry_out(cache, plan)
        _print(plans, as_json, is_dry_run=dry_run)


@dataclass(slots=True)
class _Plan:
    """What goes from one tier."""

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
    """Each of the digits must mean one namespace that is here: a slip would remove another."""
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
        is_sure = False  # nobody is there to be asked
    if not is_sure:
        raise click.ClickException("nothing was deleted: say y, or give --yes")


def _carry_out(cache: OpenCache, plan: _Plan) -> None:
    with cache.reporting(plan.place):
        remove(plan.place.tier, plan.choice)


def _print(plans: Sequence[_Plan], as_json: bool, *, is_dry_run: bool) -> None:
    if as_json:
        print_json({"tiers": [plan.as_json() for plan in plans], "is_rehearsal": is_dry_run})
        return
    rows = [
        (len(plan.choice.names) if is_dry_run else plan.choice.num_removed,
         *(plan.choice.counts[why] for why in Why), plan.swept.num_aside, plan.swept.num_stale,
         plan.choice.num_pinned, Size(plan.num_bytes), str(plan.place))
        for plan in plans
    ]  # fmt: skip
    first = "WOULD GO" if is_dry_run else "DELETED"
    titles = (first, "UNREADABLE", "FORMAT", "NAMESPACE", "ASIDE", "LEFT OVER", "PINNED", "BYTES",
              "TIER")  # fmt: skip
    print_table(titles, rows)
    if any(plan.choice.num_pinned for plan in plans):
        say("pinned blocks stay: unpin them, or clear --pinned")
