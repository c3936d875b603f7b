"""The settings of tiers: how texts, variables and files are read, and their errors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkv_cache_store.errors import TierMisconfigured
from batchkv_cache_store.opening import (
    lease_url,
    open_store,
    open_tiers,
    parse_tiers,
    queue_conflict,
    read_cache,
    read_salt,
    read_secret,
)
from batchkv_cache_store.sizes import parse_size, shown_size
from batchkv_cache_store.tiers.disk import Durability
from batchkv_cache_store.tiers.spec_types import DiskSpec, MemorySpec, ObjectsSpec, RedisSpec

MIB = 1024 * 1024
SECRET = "0123456789abcdef"


def test_all_kinds_are_read_in_their_order() -> None:
    """One text names every tier with its parameters; other parameters have defaults."""
    assert parse_tiers(
        "memory:?max=2GB disk:/Volumes/My%20Disk/b?max=50GB&fsync=file "
        "redis://hub:6380/1?max=4GB s3://bucket/some/prefix?max=1TB&endpoint=http://hub:9000/"
        "&region=eu-1"
    ) == (
        MemorySpec(2 * 10**9),
        DiskSpec(Path("/Volumes/My Disk/b"), 50 * 10**9, Durability.FILE),
        RedisSpec("redis://hub:6380/1", "redis://hub:6380/1", 4 * 10**9),
        ObjectsSpec("bucket", "some/prefix/", 10**12, "http://hub:9000", "eu-1"),
    )
    assert parse_tiers(" memory:\n disk:~/b\tredis://hub s3://bucket ") == (
        MemorySpec(),
        DiskSpec(Path.home() / "b"),
        RedisSpec("redis://hub", "redis://hub/0"),
        ObjectsSpec("bucket"),
    )


@pytest.mark.parametrize(
    ("text", "url", "place"),
    [
        ("redis://:p%40w@hub", "redis://:p%40w@hub", "redis://hub/0"),
        (
            "rediss://u:pw@[::1]:6380/3?max=1GiB&ssl_ca_certs=/etc/ca.pem",
            "rediss://u:pw@[::1]:6380/3?ssl_ca_certs=/etc/ca.pem",
            "rediss://[::1]:6380/3",
        ),
        ("unix:///run/r.sock", "unix:///run/r.sock?db=0", "unix:///run/r.sock?db=0"),
        ("unix://:pw@/r.sock?db=2", "unix://:pw@/r.sock?db=2", "unix:///r.sock?db=2"),
    ],
)
def test_redis_urls_lose_what_is_ours_and_show_no_password(text: str, url: str, place: str) -> None:
    """redis-py gets its URL without batchkv's parameters; users see it without credentials."""
    (spec,) = parse_tiers(text)
    assert isinstance(spec, RedisSpec)
    assert (spec.url, str(spec)) == (url, place) and lease_url([spec]) == url
    assert "pw" not in repr(spec) and "p%40w" not in repr(spec)
    spec.open().close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no tier"),
        ("off", "begins with"),
        ("ftp://hub", "not with ftp:"),
        ("memory:/x", "no address"),
        ("memory: memory:", "two memory tiers"),
        ("redis://a unix:///b", "two redis tiers"),
        ("disk:/x memory:", "put memory: first"),
        ("disk:", "names no folder"),
        ("disk:x/y", "not absolute"),
        ("disk://host/x", "names a host"),
        ("disk:~no-such-user-here/x", "home is not known"),
        ("disk:/x%00", "cannot be printed"),
        ("disk:/x\x1b[2J", "cannot be printed"),
        ("disk:/x?fsync=yes", "none, file or full"),
        ("disk:/x?size=1GB", "unknown parameter size: it knows max, fsync"),
        ("disk:/x?max=1GB&max=2GB", "max twice"),
        ("disk:/x?max=", "max without a value"),
        ("disk:/x?max=many", "max=many: it is not a size"),
        ("disk:/x?max=1000kb", "less than 1MiB"),
        ("redis://", "no host"),
        ("redis://hub:0", "an invalid port"),
        ("redis://hub:70000", "an invalid port"),
        ("redis://hub/jobs", "no number"),
        ("redis://hub/0/1", "no number"),
        ("redis://hub?fsync=none", "unknown parameter fsync"),
        ("rediss://hub?ssl_ca_certs=ca.pem", "no absolute path"),
        ("unix://hub/r.sock", "names no socket"),
        ("unix:///r.sock?db=-1", "no number"),
        ("s3://", "names no bucket"),
        ("s3:bucket", "names no bucket"),
        ("s3://KEY:SECRET@bucket", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket?endpoint=hub:9000", "http://HOST:PORT"),
        ("s3://bucket?endpoint=http://key:secret@hub", "http://HOST:PORT"),
        ("s3://bucket?endpoint=http://hub:x", "an invalid port"),
        ("s3://bucket?region=../x", "region"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    """Every fault is one line that says what to write."""
    with pytest.raises(ValueError) as caught:
        parse_tiers(text)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@given(
    start=st.sampled_from(
        ["redis://:", "redis://user:", "rediss://:", "unix://:", "redis://", "s3://key:"]
    ),
    middle=st.text(st.sampled_from("/?#@&= %:[]5"), max_size=4),
    end=st.sampled_from(["@hub:6379/0", "@hub?max=1", "@/sock?db=x", "", "@", "@hub?pw=x"]),
)
def test_no_error_repeats_a_password(start: str, middle: str, end: str) -> None:
    """No part of a password is in an error or a repr, however it is written."""
    try:
        shown = repr(parse_tiers(f"{start}hunter{middle}trap{end}"))
    except ValueError as fault:
        assert fault.__cause__ is None and (fault.__suppress_context__ or not fault.__context__)
        shown = str(fault)
    if start != "redis://":  # there it stands where a host does
        assert "hunter" not in shown
    if end.startswith("@"):
        assert "trap" not in shown


def test_sizes_are_read_and_shown() -> None:
    """Decimal and binary units, with and without B; small sizes show their bytes."""
    assert [parse_size(text) for text in ("4GB", "512 MiB", "1.5g", "1048576")] == [
        4 * 10**9, 512 * MIB, 1_500_000_000, MIB,
    ]  # fmt: skip
    assert [shown_size(size) for size in (0, 999, 4096, 52_300_000, 2 * 10**12)] == [
        "0 B", "999 B", "4.1 kB", "52.3 MB", "2.0 TB",
    ]  # fmt: skip


def test_tiers_are_opened_together_or_not_at_all(tmp_path: Path) -> None:
    """A text becomes a store with its tiers; a tier that cannot be used raises at once."""
    text = f"memory:?max=4MiB disk:{tmp_path / 'c'}?max=8MiB&fsync=full redis://127.0.0.1:1"
    store = open_store(text, secret=SECRET.encode())
    assert list(store.tier_stats()) == ["memory", "disk", "redis"]
    assert store.close(5.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierMisconfigured, match="cannot be used"):
        open_tiers(parse_tiers(f"memory: disk:{tmp_path / 'file' / 'c'}"))
    with pytest.raises(ValueError, match="fewer than 16 bytes"):
        open_store("memory:", secret=b"short")


def test_an_objects_tier_is_opened_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets bucket, endpoint and region, and does not connect."""
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    (spec,) = parse_tiers("s3://blocks?endpoint=http://127.0.0.1:1&region=eu-1&max=5MiB")
    with closing(spec.open()) as tier:
        assert (tier.name, tier.max_bytes) == (spec.kind, 5 * MIB)


@pytest.mark.parametrize(
    ("cache", "queue", "is_one"),
    [
        ("redis://hub", "redis://:pw@HUB:6379/0", True),
        ("redis://:pw@127.0.0.1/2", "redis://localhost?db=2", True),
        ("rediss://hub:6379/1", "redis://hub/1", True),
        ("unix:///tmp/s", "unix:///tmp/../tmp/s?db=0", True),
        ("redis://hub/1", "redis://hub/0", False),
        ("redis://hub:6380", "redis://hub", False),
        ("unix:///tmp/s?db=1", "unix:///tmp/s", False),
        ("memory:", "redis://hub", False),
        ("redis://hub", "redis://hub:port", False),
    ],
)
def test_a_cache_in_the_queues_database_is_told(cache: str, queue: str, is_one: bool) -> None:
    """Equal addresses are found in any notation, and no password is repeated."""
    sentence = queue_conflict(parse_tiers(cache), queue)
    assert (sentence is not None) is is_one and "pw" not in (sentence or "")


def test_secrets_come_from_the_environment_or_a_closed_file(tmp_path: Path) -> None:
    """A file that others may open, an empty file and a short secret are refused."""
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    named = {"BATCHKV_CACHE_SECRET_FILE": str(file)}
    assert read_secret({}) is None and read_salt({}) == b"" and read_cache({}) is None
    assert read_secret(named) == read_secret({"BATCHKV_CACHE_SECRET": SECRET}) == SECRET.encode()
    assert read_salt({"BATCHKV_CACHE_SALT": "team"}) == b"team"
    assert read_salt({"BATCHKV_CACHE_SALT_FILE": str(file)}) == SECRET.encode()
    with pytest.raises(ValueError, match="keep one"):
        read_secret({**named, "BATCHKV_CACHE_SECRET": SECRET})
    with pytest.raises(ValueError, match="fewer than 16"):
        read_secret({"BATCHKV_CACHE_SECRET": "short"})
    file.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret(named)
    assert read_cache({"BATCHKV_CACHE_FILE": str(file)}) == SECRET
    file.chmod(0o600)
    file.write_text(" \n")
    with pytest.raises(ValueError, match="empty"):
        read_secret(named)
    with pytest.raises(ValueError, match="No such file"):
        read_salt({"BATCHKV_CACHE_SALT_FILE": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="no such user"):
        read_salt({"BATCHKV_CACHE_SALT_FILE": "~no-such-user-here/x"})
