"""``batchkv cache pin`` and ``unpin``: protect blocks on disk from eviction."""

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
@click.option("--chain", is_flag=True,
              help="Pin all blocks before it, too. Without them it is of no use.")  # fmt: skip
def pin(cache_text: str | None, only: str | None, as_json: bool, key: str, chain: bool) -> None:
    """Protect a block on disk from eviction. The first digits of KEY are enough.

    This holds for all workers that share the folder. Pins take at most half of the folder's cap.
    Blocks in Redis or in object storage cannot be pinned.

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
            if found and not names:
                raise click.ClickException(f"{key} is no block: only blocks can be pinned")
            digits = only_one(key, names)
            is_whole = True
            if chain:
                before, is_whole = chain_names(tier, bytes.fromhex(digits))
                names += before
            if not tier.pin(names):
                pinned = Size(tier.stats().pinned_bytes)
                raise click.ClickException(
                    f"{count(len(names), 'block')} and the {pinned.shown} that are pinned already "
                    f"would be more than half of max ({Size(tier.max_bytes or 0).shown}) of "
                    f"{place}: unpin others, or raise max"
                )
            if not is_whole:
                say(f"a block of the chain is not in {place}; the blocks after it are pinned")
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
@click.option("--chain", is_flag=True, help="Unpin all blocks before it, too.")
@click.option("--all", "is_all", is_flag=True, help="Unpin all blocks.")
def unpin(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    key: str | None,
    chain: bool,
    is_all: bool,
) -> None:
    """Let a pinned block be evicted again. The first digits of KEY are enough.

    \b
    Examples:
      batchkv cache unpin 3f2a9c51 --chain
      batchkv cache unpin --all
    """
    if (key is None) is not is_all:
        raise click.UsageError("give a KEY or --all, not both")
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
        raise click.ClickException(f"no pinned block in {place} begins with {digits}")
    digits = only_one(digits, names)
    before = chain_names(place.tier, digest_of(names[0]))[0] if has_chain else []
    return names + [name for name in before if name in set(pinned)]


def _disk(cache: OpenCache) -> Place:
    """The disk tier, the only one that can pin; ClickException without one."""
    others = [str(place) for place in cache.places if place.spec.kind != "disk"]
    disks = [place for place in cache.places if place.spec.kind == "disk"]
    if not disks:
        raise click.ClickException(
            f"only a disk: tier can pin blocks, and this cache has none; {', '.join(others)} "
            "evicts by its own rules"
        )
    if others:
        say(f"the pin holds on disk only; {', '.join(others)} evicts by its own rules")
    return disks[0]
