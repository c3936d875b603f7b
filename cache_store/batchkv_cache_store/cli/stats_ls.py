"""``batchkv cache stats`` and ``ls``: how much there is of what."""

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
from batchkv_cache_store.cli.text import (
    KEY_DIGITS,
    NAMESPACE_DIGITS,
    Size,
    moment,
    print_json,
    print_table,
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
    "--by-namespace", is_flag=True, help="For each model and scheme too; reads every block's head."
)
def stats(cache_text: str | None, only: str | None, as_json: bool, by_namespace: bool) -> None:
    """Show how full each tier is, and of what.

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
    titles = ("TIER", *(kind.upper() for kind in KINDS), "BYTES", "CAP", "EVICTED", "ASIDE",
              "PINNED", "PINNED BYTES", "FOREIGN")  # fmt: skip
    rows = [
        (each["tier"], *each["counts"].values(), _size(each["num_bytes"]),
         _size(each["max_bytes"]), each["num_evicted"], each["num_aside"], each["num_pinned"],
         _size(each["pinned_bytes"]), each["num_foreign"])
        for each in tiers
    ]  # fmt: skip
    print_table(titles, rows)


def _print_spaces(spaces: list[dict[str, Any]]) -> None:
    rows = [
        ((each["namespace"] or "unreadable")[:NAMESPACE_DIGITS], *each["counts"].values(),
         Size(each["object_bytes"]), each["tier"], summary(each["manifest"]))
        for each in spaces
    ]  # fmt: skip
    titles = ("NAMESPACE", *(kind.upper() for kind in KINDS), "BYTES", "TIER", "MANIFEST SAYS")
    print_table(titles, rows)


def _size(num_bytes: int | None) -> Size | None:
    return None if num_bytes is None else Size(num_bytes)


@dataclass(frozen=True, slots=True)
class _Listed:
    """One line of ``ls``; ``problem`` says why a block does not tell what it is."""

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
@click.option("--namespace", metavar="DIGITS", help="Only of this one; its first digits will do.")
@click.option("--kind", type=click.Choice(KINDS), help="Only of this kind.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", default=LIMIT, show_default=True,
    help="Most lines to print.",
)  # fmt: skip
def list_blocks(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    namespace: str | None,
    kind: str | None,
    limit: int,
) -> None:
    """List blocks, tier by tier, in the order in which they are found.

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
        rows = [
            (each.key[:KEY_DIGITS], each.kind, Size(each.num_bytes),
             each.problem or (each.namespace or "")[:NAMESPACE_DIGITS], each.index,
             each.num_tokens, moment(each.last_used), each.tier + " (pinned)" * each.is_pinned)
            for each in found
        ]  # fmt: skip
        titles = ("KEY", "KIND", "BYTES", "NAMESPACE", "INDEX", "TOKENS", "LAST USED", "TIER")
        print_table(titles, rows)
        if has_more:
            say(f"there are more than {limit:,}: --limit N shows more of them")


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
