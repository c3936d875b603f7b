"""``batchkv cache pin`` and ``unpin``: what must not be evicted."""

from __future__ import annotations

import click

from batchkv_cache_store.blocks.names import digest_of, is_block_name
from batchkv_cache_store.cli.text import Size, count, print_json, say
from batchkv_cache_store.cli.tiers import (
    OpenCache,
    Place,
    cache_options,
    checked_digits,
    only_one,
    open_cache,
)
from batchkv_cache_store.upkeep.contents import chain_names, find_names


@click.command()
@cache_options
@click.argument("key")
@click.option("--chain", is_flag=True, help="All blocks before it too: alone it is of no use.")
def pin(cache_text: str | None, only: str | None, as_json: bool, key: str, chain: bool) -> None:
    """Keep a block on the disk, whatever else must go. KEY may be its first digits.

    All workers that share the folder respect it. Pins take at most half of the folder's cap; what
    is in Redis or in object storage cannot be pinned.

    \b
    Examples:
      batchkv cache pin 3f2a9c51 --chain
    """
    with open_cache(cache_text, only) as cache:
        place = _disk(cache)
        with cache.reporting(place):
            tier = place.tier
            found = find_names([tier], checked_digits(key))
            names = [name for name in found if is_block_name(name)]
            digits = only_one(key, names)
            is_whole = True
            if chain:
                before, is_whole = chain_names(tier, bytes.fromhex(digits))
                names += before
            if not tier.pin(names):
                pinned = Size(tier.stats().pinned_bytes)
                raise click.ClickException(
                    f"{count(len(names), 'block')} beside the {pinned.shown} that are pinned would "
                    f"be more than half of the {Size(tier.max_bytes or 0).shown} that {place} may "
                    "take: unpin others, or raise max"
                )
            if not is_whole:
                say(f"a block of the chain is not in {place}: what is here of it is pinned")
            pinned_bytes = tier.stats().pinned_bytes
            if as_json:
                print_json({"tier": str(place), "pinned": names, "is_chain_whole": is_whole,
                            "pinned_bytes": pinned_bytes})  # fmt: skip
            else:
                click.echo(
                    f"pinned {count(len(names), 'block')} in {place}; "
                    f"{Size(pinned_bytes).shown} are pinned there"
                )


@click.command()
@cache_options
@click.argument("key", required=False)
@click.option("--chain", is_flag=True, help="All blocks before it too.")
@click.option("--all", "is_all", is_flag=True, help="Everything that is pinned.")
def unpin(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    key: str | None,
    chain: bool,
    is_all: bool,
) -> None:
    """Let a pinned block be evicted again. KEY may be its first digits.

    \b
    Examples:
      batchkv cache unpin 3f2a9c51 --chain
      batchkv cache unpin --all
    """
    if (key is None) is not is_all:
        raise click.UsageError("give a KEY or --all, and not both")
    with open_cache(cache_text, only) as cache:
        place = _disk(cache)
        with cache.reporting(place):
            pinned = place.tier.pinned()
            names = pinned if key is None else _chosen(place, key, pinned, chain)
            place.tier.unpin(names)
            if as_json:
                print_json({"tier": str(place), "unpinned": names})
            else:
                click.echo(f"unpinned {count(len(names), 'block')} in {place}")


def _chosen(place: Place, key: str, pinned: list[str], has_chain: bool) -> list[str]:
    digits = checked_digits(key)
    names = [name for name in pinned if name.startswith(digits)]
    if not names:
        raise click.ClickException(f"nothing that begins with {digits} is pinned in {place}")
    digits = only_one(digits, names)
    before = chain_names(place.tier, digest_of(names[0]))[0] if has_chain else []
    return names + [name for name in before if name in set(pinned)]


def _disk(cache: OpenCache) -> Place:
    """The one place whose blocks can be pinned; ClickException when there is none."""
    others = [str(place) for place in cache.places if place.spec.kind != "disk"]
    disks = [place for place in cache.places if place.spec.kind == "disk"]
    if not disks:
        raise click.ClickException(
            f"blocks are pinned on disk, and this cache has no disk: tier; {', '.join(others)} "
            "evicts by rules of its own"
        )
    if others:
        say(f"pins hold on disk; {', '.join(others)} evicts by rules of its own")
    return disks[0]
