"""``batchkv cache``: its output, its changes of tiers, and its errors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_cache_store.blocks.manifests import encode_manifest
from batchkv_cache_store.blocks.names import block_name, manifest_name
from batchkv_cache_store.blocks.seal import Sealer
from batchkv_cache_store.cli import group
from batchkv_cache_store.keys import namespace, next_key, root_key
from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_cache_store.tiers.redis import PREFIX, RedisTier
from batchkv_producer.cli import cli
from cache_store.blocks import chain_of, encoded
from cache_store.places import MIB, S3_SETTINGS, objects_tier
from support.redis_server import RedisServer

MANIFEST = {"format": 1, "model": "test"}  # of blocks.NAMESPACE
OTHER = {"format": 1, "model": "other\x1b]0;owned\x07", "layers": ["full"]}
SECRET = b"0123456789abcdef"
PROMPT = range(100, 124)  # six blocks


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_CACHE", f"memory: disk:{tmp_path / 'cache'}?max=4MiB")


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    """The disk tier that the environment names."""
    return DiskTier(tmp_path / "cache", 4 * MIB)


def cache(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["cache", *map(str, arguments)], input=stdin)


def said(*arguments: object, code: int = 0) -> Any:
    """The output of a command with --json."""
    found = cache(*arguments, "--json")
    assert found.exit_code == code, found.output
    return json.loads(found.stdout)


def fill(tier: Tier, blocks: Sequence[Block], sealer: Sealer | None = None) -> list[str]:
    """Put blocks; returns their names."""
    names = [block_name(block.key, block.kind) for block in blocks]
    for name, block in zip(names, blocks, strict=True):
        tier.put(name, [encoded(block, sealer or Sealer())])
    return names


def of_other_model(num_blocks: int = 2) -> list[Block]:
    """A chain in another namespace."""
    parent = root_key(namespace(OTHER))
    blocks = []
    for block in chain_of(range(4 * num_blocks)):
        key = next_key(parent, [block.index] * 4)
        blocks.append(
            dataclasses.replace(block, namespace=namespace(OTHER), key=key, parent=parent)
        )
        parent = key
    return blocks


def publish_manifests(tier: Tier) -> None:
    for manifest in (MANIFEST, OTHER):
        digest, text = encode_manifest(manifest)  # type: ignore[arg-type]
        tier.put(manifest_name(digest), [text])


# -- which cache


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "give --cache or set BATCHKV_CACHE to the workers' tiers, like disk:"),
        ("memory:", "only a memory: tier"),
        ("disk:relative", "not absolute"),
        ("redis://:hunter2@", "no host"),
        ("disk:/no/such/folder", "no folder"),
    ],
)
def test_a_cache_that_cannot_be_looked_at_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    """Exit code 2, one line on standard error, and no password in it."""
    monkeypatch.setenv("BATCHKV_CACHE", text)
    found = cache("ls")
    assert found.exit_code == 2 and sentence in found.stderr and "hunter2" not in found.output
    assert found.stderr.startswith("batchkv: ") and found.stderr.count("\n") == 1


def test_a_tier_that_is_not_there_cannot_be_chosen(disk: DiskTier) -> None:
    """--tier must name a tier of this cache."""
    found = cache("stats", "--tier", "redis")
    assert (found.exit_code, found.stderr) == (2, "batchkv: this cache has no redis tier\n")


def test_the_cache_may_stand_in_a_file(
    disk: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BATCHKV_CACHE_FILE works like BATCHKV_CACHE; the flag overrides both."""
    (tmp_path / "named").write_text(os.environ["BATCHKV_CACHE"])
    monkeypatch.delenv("BATCHKV_CACHE")
    monkeypatch.setenv("BATCHKV_CACHE_FILE", str(tmp_path / "named"))
    assert [tier["kind"] for tier in said("stats")["tiers"]] == ["disk"]
    assert cache("stats", "--cache", "memory:").exit_code == 2


def test_a_tier_in_trouble_keeps_nobody_from_the_others(disk: DiskTier, tmp_path: Path) -> None:
    """It is reported in one line, the others are shown, and the exit code is 3 for Redis."""
    fill(disk, chain_of(PROMPT))
    text = f"disk:{tmp_path / 'cache'} redis://127.0.0.1:1?max=1GB"
    for command in ("stats", "ls", "verify", "gc"):
        found = cache(command, "--cache", text)
        assert found.exit_code == 3 and "batchkv: redis://127.0.0.1:1/0: " in found.stderr
        assert "disk" in found.stdout


def test_looking_changes_nothing(disk: DiskTier, tmp_path: Path) -> None:
    """A command under a lower cap evicts nothing."""
    names = fill(disk, chain_of(range(200), num_bytes=40_000))
    root = tmp_path / "cache"
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*.kv"))
    for command in ("stats", "stats --by-namespace", "ls", f"inspect {names[-1]}", "verify", "gc"):
        assert cache(*command.split(), "--cache", f"disk:{root}?max=1MiB").exit_code == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*.kv")) == before


# stats and ls


def test_stats_count_by_kind_and_namespace(disk: DiskTier, tmp_path: Path) -> None:
    """Counts by kind, bytes and cap, pinned, damaged and foreign files, and namespaces."""
    blocks = chain_of(PROMPT)
    state = dataclasses.replace(blocks[5], kind=Kind.STATE)
    names = fill(disk, [*blocks, state, *of_other_model()])
    publish_manifests(disk)
    disk.set_aside(names[4])
    assert disk.pin(names[:2])
    (tmp_path / "cache" / "photo.jpg").write_bytes(b"x")
    (tier,) = said("stats")["tiers"]
    assert tier["counts"] == {"kv": 7, "window": 0, "state": 1, "manifest": 2}
    assert tier["object_bytes"]["kv"] == sum(len(encoded(b)) for b in [*blocks[:5], *blocks[:2]])
    assert (tier["num_blocks"], tier["max_bytes"], tier["num_bytes"]) == (8, 4 * MIB, 12 * 4096)
    assert (tier["num_aside"], tier["num_pinned"], tier["pinned_bytes"]) == (1, 2, 8192)
    assert (tier["num_foreign"], tier["num_evicted"]) == (1, 0)
    first, second = sorted(
        said("stats", "--by-namespace")["namespaces"], key=lambda each: -each["counts"]["kv"]
    )
    assert first["manifest"] == MANIFEST and first["namespace"] == namespace(MANIFEST).hex()
    assert second["counts"] == {"kv": 2, "window": 0, "state": 0, "manifest": 1}
    shown = cache("stats", "--by-namespace").stdout
    assert "4.2 MB" in shown and "model=test" in shown and "\\u001b]0;owned\\u0007" in shown
    assert "no manifest" not in shown
    assert "\x1b" not in shown


def test_ls_lists_what_blocks_say(disk: DiskTier) -> None:
    """Kind, namespace, index and tokens of each block; filters; a note beyond the limit."""
    blocks = chain_of(PROMPT)
    names = fill(disk, [*blocks, *of_other_model()])
    publish_manifests(disk)
    disk.pin(names[:1])
    found = {each["key"]: each for each in said("ls", "--kind", "kv")["blocks"]}
    assert len(found) == 8
    line = found[blocks[3].key.hex()]
    assert (line["index"], line["num_tokens"], line["is_pinned"]) == (3, 4, False)
    assert line["namespace"] == namespace(MANIFEST).hex() and line["last_used"] > 1e9
    assert found[blocks[0].key.hex()]["is_pinned"]
    other = namespace(OTHER).hex()
    assert len(said("ls", "--namespace", other[:8])["blocks"]) == 3
    limited = cache("ls", "--limit", "4")
    assert limited.stdout.count("\n") == 5 and "more than 4" in limited.stderr
    assert said("ls", "--limit", "4")["has_more"] and not said("ls", "--limit", "10")["has_more"]
    assert cache("ls", "--namespace", "xyz").exit_code == 2


def test_unreadable_blocks_are_listed_with_their_reason(disk: DiskTier) -> None:
    """Foreign bytes under a block's name are listed with a reason and break no list."""
    for number, data in enumerate([b"", b"\x1b[2J" * 20, encoded(chain_of(PROMPT)[0])]):
        disk.put(f"{number:064x}.kv", [data])
    problems = {each["key"][-1]: each["problem"] for each in said("ls")["blocks"]}
    assert problems == {"0": "(truncated)", "1": "(bad_magic)", "2": "(key)"}
    assert "(bad_magic)" in cache("ls").stdout
    spaces = said("stats", "--by-namespace")["namespaces"]
    assert [(each["namespace"], each["counts"]["kv"]) for each in spaces] == [(None, 3)]


# inspect


def test_inspect_shows_a_block(disk: DiskTier) -> None:
    """Header, tensors, seal, manifest, parent and children; token ids only with --tokens."""
    blocks = chain_of(PROMPT)
    fill(disk, [*blocks[1:4], dataclasses.replace(blocks[2], kind=Kind.STATE)])
    publish_manifests(disk)
    digits = blocks[2].key.hex()
    found = said("inspect", digits[:10], "--children")
    assert found["key"] == digits and [p["kind"] for p in found["pieces"]] == ["kv", "state"]
    piece = found["pieces"][0]
    assert (piece["seal"], piece["index"], piece["num_tokens"]) == ("checksum, right", 2, 4)
    assert piece["manifest"] == MANIFEST and piece["writer"] == "mac.local"
    assert piece["parent"] == blocks[1].key.hex() and len(piece["parent_in"]) == 1
    assert piece["children"] == [blocks[3].key.hex()] and "tokens" not in piece
    assert piece["tensors"][0] == {
        "layer": 0, "name": "keys.codes", "dtype": "uint32", "shape": [1, 6], "num_bytes": 24,
    }  # fmt: skip
    assert said("inspect", digits, "--tokens")["pieces"][0]["tokens"] == [108, 109, 110, 111]
    shown = cache("inspect", f"{digits}.kv", "--tokens", "--children").stdout
    assert "108 109 110 111" in shown and "keys.codes" in shown and "  model" in shown
    assert "(no tier)" in cache("inspect", blocks[1].key.hex()).stdout
    assert "108 109" not in cache("inspect", digits).stdout


def test_inspect_tells_the_seal(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MAC is checked with the secret. A missing secret and damage are reported with the rest."""
    blocks = chain_of(PROMPT)
    fill(disk, blocks[:2], Sealer(SECRET))
    key = blocks[0].key.hex()
    assert "no secret" in said("inspect", key)["pieces"][0]["seal"]
    monkeypatch.setenv("BATCHKV_CACHE_SECRET", SECRET.decode())
    assert said("inspect", key)["pieces"][0]["seal"] == "MAC, right"
    monkeypatch.setenv("BATCHKV_CACHE_SECRET", "another secret, of 16 bytes or more")
    piece = said("inspect", key)["pieces"][0]
    assert piece["seal"].startswith("WRONG: mac") and piece["index"] == 0
    assert piece["tensors"] is None
    monkeypatch.setenv("BATCHKV_CACHE_SECRET", "short")
    assert "16 bytes" in cache("inspect", key).stderr


def test_inspect_needs_digits_that_mean_one_thing(disk: DiskTier) -> None:
    """Ambiguous digits are refused with all matches; unknown and invalid digits are refused."""
    for tail in ("0", "1"):
        disk.put("abcd" + "0" * 59 + tail + ".kv", [b"x"])
    disk.put("abcd" + "0" * 60 + ".state", [b"x"])
    found = cache("inspect", "abcd")
    assert found.exit_code == 2 and "matches 2 names: abcd0000" in found.stderr
    assert "no name in the cache begins with 1234" in cache("inspect", "1234").stderr
    for wrong in ("abc", "../x", "zzzz", "a" * 65):
        assert "hexadecimal" in cache("inspect", wrong).stderr


def test_inspect_shows_a_manifest(disk: DiskTier) -> None:
    """The digits of a namespace show its manifest, without control characters."""
    publish_manifests(disk)
    digest = namespace(OTHER).hex()
    assert said("inspect", digest[:6])["pieces"][0]["manifest"] == OTHER
    shown = cache("inspect", digest).stdout
    assert "\\u001b" in shown and "\x1b" not in shown and "layers" in shown


# verify


def test_verify_finds_damage_and_repairs_on_request(disk: DiskTier, tmp_path: Path) -> None:
    """Exit code 1 while there is damage; --repair sets it aside; unchecked blocks stay."""
    blocks = chain_of(PROMPT)
    names = fill(disk, blocks)
    publish_manifests(disk)
    signed = fill(disk, of_other_model(1), Sealer(SECRET))
    assert said("verify")["tiers"][0]["num_whole"] == 8
    paths = {name: next((tmp_path / "cache").rglob(name)) for name in names}
    for name, change in ((names[1], b"\xff"), (names[2], b"")):
        data = paths[name].read_bytes()
        paths[name].write_bytes(data[:-30] + change + data[-29:])
    later = bytearray(paths[names[3]].read_bytes())
    later[8] = 2  # of a version that comes later
    paths[names[3]].write_bytes(later)
    paths[names[4]].write_bytes(paths[names[5]].read_bytes())
    manifest = next((tmp_path / "cache").rglob(manifest_name(namespace(OTHER))))
    manifest.write_text("{}")
    (found,) = said("verify", code=1)["tiers"]
    assert (found["num_whole"], found["num_damaged"], found["num_unchecked"]) == (3, 4, 2)
    assert found["reasons"] == {"checksum": 2, "key": 1, "no_secret": 1, "truncated": 1,
                                "version": 1}  # fmt: skip
    assert {each["name"] for each in found["damaged"]} == {names[1], names[2], names[4],
                                                          manifest.name}  # fmt: skip
    shown = cache("verify")
    assert shown.exit_code == 1 and "--repair sets them aside" in shown.stderr
    assert all(paths[name].exists() for name in names)
    assert cache("verify", "--repair").exit_code == 1
    assert cache("verify").exit_code == 0
    left = {entry.name for entry in disk.iter_names()}
    assert left == {names[0], names[3], names[5], *signed, manifest_name(namespace(MANIFEST))}
    assert disk.stats().num_aside == 4


def test_verify_takes_samples(disk: DiskTier) -> None:
    """--sample is a number of blocks or a share; any other text is refused."""
    fill(disk, chain_of(range(400)))
    assert said("verify", "--sample", "7")["tiers"][0]["num_whole"] == 7
    assert said("verify", "--sample", "1000")["tiers"][0]["num_whole"] == 100
    assert 10 < said("verify", "--sample", "50%")["tiers"][0]["num_whole"] < 90
    assert said("verify", "--sample", "1.0")["tiers"][0]["num_whole"] == 100
    for wrong in ("0", "0%", "101%", "-1", "x", "1.5"):
        assert cache("verify", "--sample", wrong).exit_code == 2


# pin and unpin


def test_pins_hold_for_every_process(disk: DiskTier, tmp_path: Path) -> None:
    """A pinned chain stays while others are evicted; unpinned, it is evicted, too."""
    blocks = chain_of(PROMPT)
    names = fill(disk, [*blocks, dataclasses.replace(blocks[5], kind=Kind.STATE)])
    found = said("pin", blocks[5].key.hex()[:12], "--chain")
    assert sorted(found["pinned"]) == sorted(names) and found["is_chain_whole"]
    assert found["pinned_bytes"] == 7 * 4096
    more = chain_of(range(2000, 2200), num_bytes=100_000)
    fill(DiskTier(tmp_path / "cache", 4 * MIB), more)
    assert set(disk.contains_many(names)) == set(names)
    assert said("stats")["tiers"][0]["num_evicted"] > 0
    shown = cache("unpin", blocks[2].key.hex(), "--chain").stdout
    assert "unpinned 3 blocks" in shown
    assert "unpinned 4 blocks" in cache("unpin", "--all").stdout and disk.pinned() == []
    fill(disk, chain_of(range(5000, 5200), num_bytes=100_000))
    assert disk.contains_many(names) == {}


def test_pins_that_cannot_be_are_refused(disk: DiskTier, tmp_path: Path) -> None:
    """Pins above half of the cap, without a disk tier or of unknown names are refused."""
    blocks = chain_of(range(24), num_bytes=400_000)
    names = fill(disk, blocks)
    last = blocks[5].key.hex()
    found = cache("pin", last, "--chain")
    assert found.exit_code == 2 and "more than half of max (4.2 MB)" in found.stderr
    assert disk.pinned() == []
    disk.delete(names[2])
    found = cache("pin", last, "--chain")
    assert found.exit_code == 0 and "a block of the chain is not in" in found.stderr
    assert sorted(disk.pinned()) == sorted(names[3:])
    assert "no name in the cache begins with" in cache("pin", "00000000").stderr
    publish_manifests(disk)
    digest, _ = encode_manifest(MANIFEST)  # type: ignore[arg-type]
    found = cache("pin", digest.hex())
    assert found.exit_code == 2 and "only blocks can be pinned" in found.stderr
    assert "no pinned block in disk:" in cache("unpin", "00000000").stderr
    for wrong in (("unpin",), ("unpin", last, "--all")):
        assert cache(*wrong).exit_code == 2
    found = cache("pin", last, "--cache", "redis://127.0.0.1:1")
    assert found.exit_code == 2 and "only a disk: tier can pin" in found.stderr
    text = f"disk:{tmp_path / 'cache'}?max=4MiB redis://127.0.0.1:1"
    found = cache("pin", last, "--cache", text)
    assert found.exit_code == 0 and "evicts by its own rules" in found.stderr


# clear and gc


def test_clear_asks_first_and_leaves_what_is_not_ours(disk: DiskTier, tmp_path: Path) -> None:
    """Without yes nothing is deleted. Foreign files stay; pinned blocks do without --pinned."""
    names = fill(disk, chain_of(PROMPT))
    publish_manifests(disk)
    disk.pin(names[:1])
    foreign = tmp_path / "cache" / "blocks-1" / "notes.txt"
    foreign.write_text("not ours")
    for answer in ("n\n", ""):
        found = cache("clear", stdin=answer)
        assert found.exit_code == 2 and "give --yes" in found.stderr
        assert "Delete 7 blocks" in found.stderr
    assert len(disk.contains_many(names)) == 6
    found = cache("clear", stdin="y\n")
    assert found.exit_code == 0 and "pinned blocks stay" in found.stderr
    assert [entry.name for entry in disk.iter_names()] == names[:1]
    assert said("clear", "--pinned", "--yes")["tiers"][0]["num_removed"] == 1
    assert not list(disk.iter_names()) and disk.pinned() == [] and foreign.exists()
    assert cache("clear").exit_code == 0


def test_clear_takes_one_namespace(disk: DiskTier) -> None:
    """Only the named namespace is deleted; digits without a match are refused."""
    names = fill(disk, chain_of(PROMPT))
    fill(disk, of_other_model())
    publish_manifests(disk)
    assert cache("clear", "--namespace", "00000000", "--yes").exit_code == 2
    found = said("clear", "--namespace", namespace(OTHER).hex()[:8], "--yes")
    assert found["tiers"][0]["num_removed"] == 3
    left = {entry.name for entry in disk.iter_names()}
    assert left == {*names, manifest_name(namespace(MANIFEST))}


def test_gc_removes_what_nobody_will_use(disk: DiskTier, tmp_path: Path) -> None:
    """gc removes stale and unreadable files; other formats and models only with flags."""
    names = fill(disk, chain_of(PROMPT))
    others = fill(disk, of_other_model())
    publish_manifests(disk)
    disk.set_aside(names[0])
    unreadable, later = f"{1:064x}.kv", names[2]
    disk.put(unreadable, [b"not a block"])
    path = next((tmp_path / "cache").rglob(later))
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    stale = tmp_path / "cache" / "temporary" / f"{names[1]}.1.0.4096"
    stale.write_bytes(b"x")
    os.utime(stale, (1, 1))
    rehearsed = said("gc", "--dry-run")
    assert stale.exists() and disk.contains_many([unreadable])
    (tier,) = rehearsed["tiers"]
    assert (tier["num_chosen"], tier["num_removed"]) == (1, 0) and rehearsed["is_rehearsal"]
    assert (tier["num_aside"], tier["num_stale"]) == (1, 1)
    assert "WOULD GO" in cache("gc", "--dry-run").stdout
    (tier,) = said("gc")["tiers"]
    assert tier["reasons"] == {"unreadable": 1, "format": 0, "namespace": 0}
    assert not stale.exists() and not list((tmp_path / "cache" / "aside").iterdir())
    assert set(disk.contains_many([*names[1:], *others])) == {*names[1:], *others}
    disk.pin(others[:1])
    (tier,) = said("gc", "--other-than", namespace(MANIFEST).hex()[:8], "--other-formats")["tiers"]
    assert tier["reasons"] == {"unreadable": 0, "format": 1, "namespace": 2}
    assert tier["num_pinned"] == 1
    left = {entry.name for entry in disk.iter_names()}
    assert left == {names[1], *names[3:], others[0], manifest_name(namespace(MANIFEST))}
    for wrong in (("--other-than", "00000000"), ("--namespace", "abcd", "--other-than", "abcd")):
        assert cache("gc", *wrong).exit_code == 2
    assert set(e.name for e in disk.iter_names()) == left


# Other tiers


def test_redis_is_looked_after_too(cache_server: RedisServer, tmp_path: Path) -> None:
    """All commands work on a real server, and foreign keys stay."""
    text = f"{cache_server.url}"
    blocks = chain_of(PROMPT)
    with closing(RedisTier(text)) as tier, cache_server.connect() as connection:
        names = fill(tier, blocks)
        publish_manifests(tier)
        connection.set("somebody", "else's")
        connection.set(PREFIX + "notes", "not ours")
        connection.setrange(PREFIX + names[1], 350, b"damage")
        arguments = ("--cache", text)
        (found,) = said("stats", *arguments)["tiers"]
        assert found["counts"] == {"kv": 6, "window": 0, "state": 0, "manifest": 2}
        assert found["max_bytes"] == 64 * MIB and found["num_foreign"] is None
        assert len(said("ls", *arguments)["blocks"]) == 8
        piece = said("inspect", blocks[2].key.hex()[:9], *arguments)["pieces"][0]
        assert piece["tiers"] == [text] and piece["parent_in"] == [text]
        assert cache("verify", "--repair", *arguments).exit_code == 1
        assert said("verify", *arguments)["tiers"][0]["num_whole"] == 7
        assert said("gc", *arguments)["tiers"][0]["num_removed"] == 0
        assert said("clear", "--yes", *arguments)["tiers"][0]["num_removed"] == 7
        assert connection.dbsize() == 2


def test_object_storage_is_looked_after_too(
    bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands work on an S3 server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_SETTINGS["aws_access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SETTINGS["aws_secret_access_key"])
    arguments = ("--cache", f"s3://blocks/cli?endpoint={bucket_url}&region=us-east-1")
    blocks = chain_of(PROMPT)
    with closing(objects_tier(bucket_url, "cli/")) as tier:
        fill(tier, blocks)
        publish_manifests(tier)
    (found,) = said("stats", *arguments)["tiers"]
    assert (found["counts"]["kv"], found["counts"]["manifest"]) == (6, 2)
    assert said("inspect", blocks[2].key.hex()[:9], *arguments)["pieces"][0]["index"] == 2
    assert said("verify", *arguments)["tiers"][0]["num_whole"] == 8
    assert said("clear", "--yes", *arguments)["tiers"][0]["num_removed"] == 8
    assert said("ls", *arguments)["blocks"] == []


# The command itself


def test_other_packages_add_commands(monkeypatch: pytest.MonkeyPatch, disk: DiskTier) -> None:
    """Each entry point of the group is a command; one that cannot be imported says why."""

    @click.command()
    def extra() -> None:
        click.echo("added")

    monkeypatch.setattr(sys.modules[__name__], "extra", extra, raising=False)
    found = {
        "why": EntryPoint("why", f"{__name__}:extra", group.ENTRY_POINT_GROUP),
        "gone": EntryPoint("gone", "no_such_module_here:command", group.ENTRY_POINT_GROUP),
        "wrong": EntryPoint("wrong", "json:dumps", group.ENTRY_POINT_GROUP),
    }
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(group, "_foreign_commands", lambda: found)
    assert cache("why").stdout == "added\n"
    missing = cache("gone", "--some", "thing")
    assert missing.exit_code == 2 and "needs no_such_module_here: pip install" in missing.stderr
    assert "is not a command" in cache("wrong").stderr
    del found["wrong"]
    assert "Not installed" in cache("--help").stdout


def test_the_command_works_as_a_process(disk: DiskTier) -> None:
    """The installed command: JSON on standard output, one line on standard error, exit codes."""
    fill(disk, chain_of(PROMPT))

    def process(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "batchkv_producer", "cache", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    found = process("stats", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["tiers"][0]["num_blocks"] == 6
    found = process("inspect", "zz")
    assert (found.returncode, found.stdout) == (2, "") and found.stderr.startswith("batchkv: ")
