"""``batchkv cache inspect``: shows one block's header, tensors and seal."""

from __future__ import annotations

import struct
from typing import Any

import click

from batchkv_cache_store.blocks.block import VERSION, Block
from batchkv_cache_store.blocks.header import Limits
from batchkv_cache_store.blocks.names import digest_of, is_manifest_name, kind_of
from batchkv_cache_store.blocks.peek import Head, peek
from batchkv_cache_store.blocks.seal import Buffer, Sealer
from batchkv_cache_store.cli.table import Column, print_table, without_middle
from batchkv_cache_store.cli.text import Size, moment, print_fields, print_json
from batchkv_cache_store.cli.tiers import OpenCache, Place, cache_options, open_cache, sealer
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.keys import Manifest
from batchkv_cache_store.upkeep.check import check_block
from batchkv_cache_store.upkeep.contents import find_names, iter_items, read_manifests


@click.command()
@cache_options
@click.argument("key")
@click.option("--tokens", "has_tokens", is_flag=True,
              help="Show the token ids, too. They are the prompt.")  # fmt: skip
@click.option(
    "--children",
    "has_children",
    is_flag=True,
    help="Show the blocks that follow it, too. This reads the head of every block.",
)
def inspect(
    cache_text: str | None,
    only: str | None,
    as_json: bool,
    key: str,
    has_tokens: bool,
    has_children: bool,
) -> None:
    """Show one block: its header, tensors, seal and place in the chain.

    KEY is a block's key or a namespace; its first digits are enough. A MAC is checked with the
    secret in BATCHKV_CACHE_SECRET, or in the file that BATCHKV_CACHE_SECRET_FILE names.

    \b
    Examples:
      batchkv cache inspect 3f2a9c51
      batchkv cache inspect 3f2a9c51 --children --json
      batchkv cache inspect 3f2a9c51 --tier disk --tokens
    """
    own = sealer()
    with open_cache(cache_text, only) as cache:
        digits, found = cache.find(key)
        pieces = []
        for name, places in found.items():
            with cache.reporting(places[0]):
                pieces.append(_piece(cache, name, places, own, has_tokens))
        if has_children:
            children = _children(cache, bytes.fromhex(digits))
            for piece in pieces:
                piece["children"] = children
        if as_json:
            print_json({"key": digits, "pieces": pieces})
            return
        for number, piece in enumerate(pieces):
            if number:
                click.echo("")
            _print_piece(piece)


def _piece(
    cache: OpenCache, name: str, places: list[Place], own: Sealer, has_tokens: bool
) -> dict[str, Any]:
    """The description of one name, read from the first tier that holds it."""
    tier = places[0].tier
    data = tier.get_heads([name], Limits().max_block_bytes + 1).get(name, b"")
    said: dict[str, Any] = {
        "name": name,
        "kind": kind_of(name),
        "tiers": [str(place) for place in places],
        "num_bytes": len(data),
        "is_pinned": name in tier.pinned(),
    }
    if is_manifest_name(name):
        return {**said, "manifest": _manifest(cache, digest_of(name))}
    block: Block | None = None
    try:
        block = check_block(name, data, own)
        said["seal"] = "MAC, right" if own.is_keyed else "checksum, right"
    except BlockRejected as fault:
        is_unknown = fault.reason is Reason.NO_SECRET
        said["seal"] = "MAC, but no secret is set to check it" if is_unknown else f"WRONG: {fault}"
    return said | _header(cache, data, has_tokens) | {"tensors": _tensors(block)}


def _header(cache: OpenCache, data: Buffer, has_tokens: bool) -> dict[str, Any]:
    try:
        head = peek(data)
    except BlockRejected:
        return {}
    said = {
        "format": VERSION,
        "is_signed": head.is_signed,
        "namespace": head.links.namespace.hex(),
        "index": head.index,
        "num_tokens": head.num_tokens,
        "num_tensors": head.num_tensors,
        "writer": head.writer,
        "time_ms": head.time_ms,
        "parent": head.links.parent.hex(),
        "parent_in": _parent_in(cache, head),
        "manifest": _manifest(cache, head.links.namespace),
    }
    if has_tokens:
        said["tokens"] = list(struct.unpack(f"<{head.num_tokens}I", head.tokens))
    return said


def _parent_in(cache: OpenCache, head: Head) -> list[str] | None:
    """The tiers that hold the block before this one; None for the first block of a chain."""
    if head.index == 0:
        return None
    holders = []
    for place in cache.places:
        with cache.reporting(place):
            names = find_names([place.tier], head.links.parent.hex())
            holders += [str(place)] if any(not is_manifest_name(name) for name in names) else []
    return holders


def _manifest(cache: OpenCache, namespace: bytes) -> Manifest | None:
    for place in cache.places:
        with cache.reporting(place):
            found = read_manifests(place.tier, [namespace])
            if found:
                return found[namespace]
    return None


def _children(cache: OpenCache, key: bytes) -> list[str]:
    children: set[str] = set()
    for place in cache.places:
        with cache.reporting(place):
            for item in iter_items(place.tier):
                if item.links is not None and item.links.parent == key:
                    children.add(item.links.key.hex())
    return sorted(children)


def _tensors(block: Block | None) -> list[dict[str, Any]] | None:
    if block is None:
        return None
    return [
        {"layer": t.layer, "name": t.name, "dtype": t.dtype, "shape": list(t.shape),
         "num_bytes": t.num_bytes}
        for t in block.tensors
    ]  # fmt: skip


def _print_piece(piece: dict[str, Any]) -> None:
    manifest: Manifest = piece.get("manifest") or {}
    where = None
    if piece.get("parent") is not None:
        holders = piece["parent_in"]
        where = "(the root of its chain)" if holders is None else ", ".join(holders) or "(no tier)"
    children = piece.get("children")
    time_ms = piece.get("time_ms")
    print_fields(
        [
            ("name", piece["name"]),
            ("in", piece["tiers"]),
            ("pinned", "yes" if piece["is_pinned"] else None),
            ("bytes", Size(piece["num_bytes"])),
            ("seal", piece.get("seal")),
            ("format", piece.get("format")),
            ("namespace", piece.get("namespace")),
            *((f"  {field}", value) for field, value in sorted(manifest.items())),
            ("index", piece.get("index")),
            ("tokens", piece.get("num_tokens")),
            ("parent", piece.get("parent")),
            ("  in", where),
            ("children", None if children is None else children or "none"),
            ("writer", piece.get("writer") or None),
            ("written", moment(time_ms / 1000) if time_ms else None),
            ("token ids", _joined(piece.get("tokens"))),
        ]
    )
    if piece.get("tensors"):
        click.echo("")
        tensors = piece["tensors"]
        shapes = [" x ".join(map(str, tensor["shape"])) for tensor in tensors]
        print_table(
            [
                Column("LAYER", [tensor["layer"] for tensor in tensors]),
                Column("TENSOR", [tensor["name"] for tensor in tensors], without_middle, 16),
                Column("DTYPE", [tensor["dtype"] for tensor in tensors]),
                Column("SHAPE", shapes, without_middle, 16),
                Column("BYTES", [Size(tensor["num_bytes"]) for tensor in tensors]),
            ]
        )


def _joined(tokens: list[int] | None) -> str | None:
    return None if tokens is None else " ".join(map(str, tokens))
