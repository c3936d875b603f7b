"""``batchkv cache stats`` and ``ls``: counts and lists the contents of tiers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import click

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.blocks.names import MANIFEST, is_manifest_name, kind_of
from batchkv_cache_store.blocks.peek import HEAD_BYTES, peek
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.cli.table import (
    Column,
    first_digits,
    print_table,
    table_lines,
    without_middle,
)
from batchkv_cache_store.cli.text import (
    KEY_DIGITS,
    NAMESPACE_DIGITS,
    Size,
    folded,
    moment,
    output_width,
    print_json,
    printable,
    say,
    summary,
)
from batchkv_cache_store.cli.tiers import (
    OpenCache,
    Place,
    cache_options,
    checked_digits,
    open_cache,
)
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.keys import Manifest
from batchkv_cache_store.tiers.base import Entry, TierStats
from batchkv_cache_store.upkeep.contents import Tally, iter_heads, iter_items, read_manifests

KINDS = (*(kind.value for kind in Kind), MANIFEST)
LIMIT = 50


@click.command()
@cache_options
@click.option(
    "--by-namespace",
    is_flag=True,
    help="Count by model and scheme, too. This reads the head of every block.",
)
def stats(cache_text: str | None, only: str | None, as_json: bool, by_namespace: bool) -> None:
    """Show how full each tier is, and what it holds.

    \b
    Examples:
      batchkv cache stats
      batchkv cache stats --by-namespace
      batchkv cache stats --json | jq '.tiers[] | {tier, num_bytes}'
    """
    with open_cache(cache_text, only) as cache:
        tiers: list[dict[str, Any]] = []
        spaces: list[dict[str, Any]] = []
        for place in cache.places:
            with cache.reporting(place):
                found = place.tier.stats()
                tally = Tally()
                by_space: defaultdict[bytes | None, Tally] = defaultdict(Tally)
                if by_namespace:
                    for item in iter_items(place.tier):
                        tally.add(item.entry)
                        by_space[item.namespace].add(item.entry)
                else:
                    for entry in place.tier.iter_names():
                        tally.add(entry)
                tiers.append(_tier_fields(place, found, tally))
                known = [namespace for namespace in by_space if namespace is not None]
                manifests = read_manifests(place.tier, known)
                spaces += [
                    _space_fields(place, namespace, each, manifests.get(namespace or b""))
                    for namespace, each in by_space.items()
                ]
        if as_json:
            print_json({"tiers": tiers} | ({"namespaces": spaces} if by_namespace else {}))
            return
        _print_tiers(tiers)
        if by_namespace:
            click.echo("")
            _print_spaces(spaces)


def _tier_fields(place: Place, found: TierStats, tally: Tally) -> dict[str, Any]:
    return {
        "tier": str(place),
        "kind": place.spec.kind,
        **asdict(found),
        "num_blocks": sum(tally.counts.values()) - tally.counts[MANIFEST],
        "counts": {kind: tally.counts[kind] for kind in KINDS},
        "object_bytes": {kind: tally.num_bytes[kind] for kind in KINDS},
    }


def _space_fields(
    place: Place, namespace: bytes | None, tally: Tally, manifest: Manifest | None
) -> dict[str, Any]:
    return {
        "tier": str(place),
        "namespace": namespace.hex() if namespace is not None else None,
        "counts": {kind: tally.counts[kind] for kind in KINDS},
        "object_bytes": sum(tally.num_bytes.values()),
        "manifest": manifest,
    }


def _print_tiers(tiers: list[dict[str, Any]]) -> None:
    sizes = {
        name: [_size(each[name]) for each in tiers]
        for name in ("num_bytes", "max_bytes", "pinned_bytes")
    }
    print_table(
        [
            Column("TIER", [each["tier"] for each in tiers], without_middle, min_width=12),
            *_kind_columns(tiers),
            Column("BYTES", sizes["num_bytes"]),
            Column("CAP", sizes["max_bytes"]),
            Column("EVICTED", [each["num_evicted"] for each in tiers], if_any=True),
            Column("ASIDE", [each["num_aside"] for each in tiers], if_any=True),
            Column("PINNED", [each["num_pinned"] for each in tiers], if_any=True),
            Column("PINNED BYTES", sizes["pinned_bytes"], drop=1, if_any=True),
            Column("FOREIGN", [each["num_foreign"] for each in tiers], drop=3, if_any=True),
        ]
    )


def _print_spaces(spaces: list[dict[str, Any]]) -> None:
    """A line for each namespace, with its manifest below."""
    names = [(each["namespace"] or "unreadable")[:NAMESPACE_DIGITS] for each in spaces]
    columns = [
        Column("NAMESPACE", names),
        *_kind_columns(spaces),
        Column("BYTES", [Size(each["object_bytes"]) for each in spaces]),
        Column("TIER", [each["tier"] for each in spaces], without_middle, min_width=12),
    ]
    titles, *lines = table_lines(columns, output_width())
    click.echo(titles)
    for line, each in zip(lines, spaces, strict=True):
        click.echo(line)
        known = printable(summary(each["manifest"]) or "no manifest")
        click.echo("\n".join(folded(known, indent=2)))


def _kind_columns(found: list[dict[str, Any]]) -> list[Column]:
    """A column for each kind: how many objects of it there are."""
    counts = {kind: [each["counts"][kind] for each in found] for kind in KINDS}
    return [
        Column("KV", counts[Kind.KV]),
        Column("WINDOW", counts[Kind.WINDOW], if_any=True),
        Column("STATE", counts[Kind.STATE], if_any=True),
        Column("MANIFEST", counts[MANIFEST], drop=2),
    ]


def _size(num_bytes: int | None) -> Size | None:
    return None if num_bytes is None else Size(num_bytes)


@dataclass(frozen=True, slots=True)
class _Listed:
    """One line of ``ls``; ``problem`` says why a block's header cannot be read."""

    key: str
    kind: str
    num_bytes: int
    namespace: str | None
    index: int | None
    num_tokens: int | None
    last_used: float | None
    is_pinned: bool
    tier: str
    problem: str | None = None


@click.command("ls")
@cache_options
@click.option("--namespace", metavar="DIGITS", help="List only blocks of this namespace. Its first "
              "digits are enough.")  # fmt: skip
@click.option("--kind", type=click.Choice(KINDS), help="List only blocks of this kind.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", default=LIMIT, show_default=True,
    help="List at most so many blocks.",
)  # fmt: skip
def list_blocks(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    namespace: str | None,
    kind: str | None,
    limit: int,
) -> None:
    """List blocks, tier by tier, in no particular order.

    A table that is wider than the output shows fewer digits and columns; --json shows all.

    \b
    Examples:
      batchkv cache ls --tier disk
      batchkv cache ls --namespace 3f2a9c51 --kind state --limit 1000
      batchkv cache ls --json | jq -r '.blocks[].key'
    """
    digits = None if namespace is None else checked_digits(namespace)
    with open_cache(cache_text, only) as cache:
        found = list(islice(_listed(cache, digits, kind), limit + 1))
        has_more, found = len(found) > limit, found[:limit]
        if as_json:
            print_json({"blocks": [asdict(each) for each in found], "has_more": has_more})
            return
        _print_blocks(found)
        if has_more:
            say(f"there are more than {limit:,} blocks: --limit N lists more of them")


def _print_blocks(found: list[_Listed]) -> None:
    spaces = [each.problem or (each.namespace or "")[:NAMESPACE_DIGITS] for each in found]
    widest_problem = max((len(each.problem or "") for each in found), default=0)
    times = [moment(each.last_used, "%Y-%m-%d %H:%M") for each in found]
    # A cache has at most one tier of a kind, so the first part of its address names it.
    tiers = [each.tier.partition(":")[0] for each in found]
    print_table(
        [
            Column("KEY", [each.key[:KEY_DIGITS] for each in found], first_digits, min_width=10),
            Column("KIND", [each.kind for each in found]),
            Column("BYTES", [Size(each.num_bytes) for each in found]),
            Column("NAMESPACE", spaces, first_digits, min_width=widest_problem),
            Column("INDEX", [each.index for each in found], drop=2),
            Column("TOKENS", [each.num_tokens for each in found], drop=1),
            Column("LAST USED", times),
            Column("TIER", tiers),
            Column("PINNED", ["yes" if each.is_pinned else "" for each in found], if_any=True),
        ]
    )


def _listed(cache: OpenCache, digits: str | None, kind: str | None) -> Iterator[_Listed]:
    for place in cache.places:
        with cache.reporting(place):
            pinned = set(place.tier.pinned())
            entries = (e for e in place.tier.iter_names() if kind in (None, kind_of(e.name)))
            for entry, head in iter_heads(place.tier, entries, HEAD_BYTES):
                line = _line(place, entry, head, entry.name in pinned)
                if digits is None or (line.namespace or "").startswith(digits):
                    yield line


def _line(place: Place, entry: Entry, data: Buffer, is_pinned: bool) -> _Listed:
    key, _, kind = entry.name.partition(".")
    known = (key, kind, entry.num_bytes)
    rest = (entry.last_used, is_pinned, str(place))
    if is_manifest_name(entry.name):
        return _Listed(*known, key, None, None, *rest)
    try:
        head = peek(data)
    except BlockRejected as fault:
        return _Listed(*known, None, None, None, *rest, problem=f"({fault.reason})")
    if head.links.key.hex() != key:
        return _Listed(*known, None, None, None, *rest, problem=f"({Reason.KEY})")
    return _Listed(*known, head.links.namespace.hex(), head.index, head.num_tokens, *rest)
