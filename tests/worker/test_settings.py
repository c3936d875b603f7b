"""Settings: each from its variable or its flag, each fault named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from batchkv_cache_store import keys
from batchkv_producer import agreed
from batchkv_producer.settings_table import BY_NAME
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import Adapter
from batchkv_worker.errors import SettingsError
from batchkv_worker.settings import (
    SETTINGS,
    Admission,
    WorkerSettings,
    parsed,
    unknown_variables,
)

BASE = {"BATCHKV_MODEL": "demo"}


def test_table_and_fields_are_one() -> None:
    """Each setting of the table has its field, each field its setting, with the same default."""
    hidden = {"cache_secret", "cache_salt"}  # never a flag, so that no process list shows them
    assert set(BY_NAME) == {field.name for field in fields(WorkerSettings)} - hidden
    settings = WorkerSettings(model="m")
    for setting in SETTINGS:
        expected = parsed(setting.name, setting.default) if setting.default else None
        found = getattr(settings, setting.name)
        assert setting.name == "model" or (None if found == () else found) == expected
    assert get_args(Admission) == BY_NAME["admission"].choices


def test_numbers_of_several_rooms_agree() -> None:
    """The producer's estimate counts in the blocks that keys are made of."""
    assert agreed.BLOCK_TOKENS == keys.BLOCK_TOKENS


def test_defaults_need_only_a_model() -> None:
    """With a model named, every other setting has its documented default."""
    settings = WorkerSettings.from_env(BASE)
    assert settings == WorkerSettings(model="demo")
    assert (settings.kv_scheme, settings.slots, settings.prefetch) == ("affine8", None, None)
    assert settings.memory_bytes is None
    assert not settings.wired_limit


def test_no_model_says_how_to_name_one() -> None:
    """Without a model nothing starts, and the message shows the flag and the variable."""
    with pytest.raises(SettingsError, match=r"-m MODEL.*BATCHKV_MODEL"):
        WorkerSettings.from_env({})


def test_every_variable_is_read() -> None:
    """Each variable of the table changes its own field."""
    texts = {
        "BATCHKV_MODEL": "m",
        "BATCHKV_ADAPTERS": "a=/one,b=/two",
        "BATCHKV_KV_SCHEME": "affine4",
        "BATCHKV_SLOTS": "4",
        "BATCHKV_PREFETCH": "0",
        "BATCHKV_MEMORY": "4GB",
        "BATCHKV_ADMISSION": "worst",
        "BATCHKV_PREFILL_CHUNK": "1024",
        "BATCHKV_LANE_CHUNK": "512",
        "BATCHKV_DTYPE": "float32",
        "BATCHKV_WEIGHTS": "packed",
        "BATCHKV_WIRED_LIMIT": "on",
        "BATCHKV_LEASE_SECONDS": "20",
        "BATCHKV_HEARTBEAT_SECONDS": "5",
        "BATCHKV_MAINTENANCE_SECONDS": "7",
        "BATCHKV_ENGINE_TIMEOUT": "8",
        "BATCHKV_LOAD_TIMEOUT": "9",
        "BATCHKV_DRAIN_SECONDS": "10",
        "BATCHKV_STAY_SECONDS": "12",
        "BATCHKV_POLITE": "on",
        "BATCHKV_CACHE_WRITE": "all",
        "BATCHKV_CACHE_LEASE_SECONDS": "11",
        "BATCHKV_CACHE_AUDIT": "0.5",
        "BATCHKV_KV_ADOPT_FLOAT": "on",
        "BATCHKV_TRACE": "t.json",
        "BATCHKV_REUSE_KEEP": "2d",
        "BATCHKV_REUSE_MAX_ANSWERS": "12",
        "BATCHKV_REUSE_MAX": "2MB",
    }
    assert {setting.variable for setting in SETTINGS} == set(texts)
    texts["BATCHKV_CACHE"] = "redis://hub:6380/0"
    assert WorkerSettings.from_env(texts) == WorkerSettings(
        model="m",
        adapters=(Adapter("a", "/one"), Adapter("b", "/two")),
        kv_scheme="affine4",
        slots=4,
        prefetch=0,
        memory_bytes=4_000_000_000,
        admission="worst",
        prefill_chunk=1024,
        lane_chunk=512,
        dtype="float32",
        weights="packed",
        wired_limit=True,
        lease_seconds=20,
        heartbeat_seconds=5.0,
        maintenance_seconds=7.0,
        engine_timeout_seconds=8.0,
        load_timeout_seconds=9.0,
        drain_seconds=10.0,
        stay_seconds=12.0,
        polite=True,
        cache="redis://hub:6380/0",
        cache_write="all",
        cache_lease_seconds=11.0,
        cache_audit=0.5,
        trace="t.json",
        kv_adopt_float=True,
        reuse_seconds=172_800,
        reuse_answers=12,
        reuse_bytes=2_000_000,
    )


def test_the_limits_of_remembered_answers_are_checked() -> None:
    """A time that is too short is refused."""
    with pytest.raises(SettingsError, match=r"BATCHKV_REUSE_KEEP=10m: expected a time of at least"):
        WorkerSettings.from_env({**BASE, "BATCHKV_REUSE_KEEP": "10m"})


def test_a_flag_overrides_its_variable() -> None:
    """What is said on the command line wins; what is not said there is None and does not."""
    environ = {**BASE, "BATCHKV_SLOTS": "4"}
    assert WorkerSettings.from_env(environ, slots="6", prefetch=None).slots == 6


def test_an_empty_variable_is_not_set() -> None:
    """``BATCHKV_SLOTS=`` in a service file means the default."""
    assert WorkerSettings.from_env({**BASE, "BATCHKV_SLOTS": ""}).slots is None


def test_auto_leaves_slots_to_the_device() -> None:
    """``auto`` is allowed and is the default; two rows then wait for each slot that there is."""
    said_auto = {"BATCHKV_SLOTS": "auto", "BATCHKV_PREFETCH": "auto"}
    settings = WorkerSettings.from_env(BASE | said_auto)
    assert settings == WorkerSettings(model="demo")
    assert [settings.rows_ahead(slots) for slots in (16, 64)] == [32, 128]
    said = WorkerSettings.from_env(BASE, slots="4", prefetch="7")
    assert (said.slots, said.rows_ahead(4)) == (4, 7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BATCHKV_KV_SCHEME", "int8"),
        ("BATCHKV_SLOTS", "0"),
        ("BATCHKV_SLOTS", "many"),
        ("BATCHKV_PREFETCH", "-1"),
        ("BATCHKV_ADMISSION", "best"),
        ("BATCHKV_MEMORY", "4 elephants"),
        ("BATCHKV_MEMORY", "0"),
        ("BATCHKV_PREFILL_CHUNK", "300"),
        ("BATCHKV_DTYPE", "int4"),
        ("BATCHKV_WIRED_LIMIT", "perhaps"),
        ("BATCHKV_LEASE_SECONDS", "1.5"),
        ("BATCHKV_ENGINE_TIMEOUT", "nan"),
        ("BATCHKV_DRAIN_SECONDS", "inf"),
        ("BATCHKV_MODEL", "a\nb"),
    ],
)
def test_a_bad_value_is_named(name: str, text: str) -> None:
    """The error shows the variable, the value and what is allowed, and is exit code 2."""
    with pytest.raises(SettingsError) as caught:
        WorkerSettings.from_env({**BASE, name: text})
    assert str(caught.value).startswith(f"{name}={text}: ")
    assert "expected " in str(caught.value) or "known: float, affine8" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_bad_flag_is_named_as_a_flag() -> None:
    """The error names what the user typed, not the variable behind it."""
    with pytest.raises(SettingsError, match=r"^--kv-scheme int8: unknown KV scheme 'int8'"):
        WorkerSettings.from_env(BASE, kv_scheme="int8")


def test_heartbeats_must_fit_into_a_lease() -> None:
    """A heartbeat of more than half a lease is refused: one late one would lose the jobs."""
    with pytest.raises(SettingsError, match=r"BATCHKV_HEARTBEAT_SECONDS=15 .*LEASE_SECONDS=20"):
        WorkerSettings.from_env({**BASE, "BATCHKV_LEASE_SECONDS": "20"})


def test_unknown_variables_are_warned_of() -> None:
    """A variable that nobody reads gets a warning with the closest name; others' do not."""
    environ = {"BATCHKV_SLOT": "4", "BATCHKV_XYZ": "1", "BATCHKV_HOME": "/x", "BATCHKV_DATA": "/y"}
    assert unknown_variables({**environ, "PATH": ""}) == [
        "BATCHKV_SLOT is not a setting of batchkv and does nothing; did you mean BATCHKV_SLOTS?",
        "BATCHKV_XYZ is not a setting of batchkv and does nothing",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"BATCHKV_CACHE": "disk:blocks"}, "BATCHKV_CACHE: "),
        ({"BATCHKV_CACHE_AUDIT": "2"}, "BATCHKV_CACHE_AUDIT=2: expected a share"),
        ({"BATCHKV_CACHE_WRITE": "all"}, "there is no cache to write to"),
        ({"BATCHKV_CACHE_WRITE": "shared"}, "there is no cache to write to"),
        ({"BATCHKV_CACHE_WRITE": "none", "BATCHKV_CACHE": "memory:"}, "one of needed, shared"),
        ({"BATCHKV_CACHE_SECRET": "short"}, "fewer than 16 bytes"),
        ({"BATCHKV_KV_ADOPT_FLOAT": "on"}, "there is no cache"),
        ({"BATCHKV_KV_ADOPT_FLOAT": "on", "BATCHKV_CACHE": "memory:", "BATCHKV_KV_SCHEME": "float"},
         "own blocks are float"),
        ({"BATCHKV_CACHE_LEASE_SECONDS": "9", "BATCHKV_CACHE": "memory:"}, "need a Redis tier"),
    ],
)  # fmt: skip
def test_what_the_cache_cannot_do_is_refused(changes: dict[str, str], told: str) -> None:
    """A setting that would do nothing, or cannot be, is named with what to do."""
    with pytest.raises(SettingsError, match=told):
        WorkerSettings.from_env({"BATCHKV_MODEL": "m", **changes})


def test_secrets_of_the_cache_are_not_shown() -> None:
    """Neither the tiers' passwords nor secret and salt stand in a settings' repr; off is off."""
    settings = WorkerSettings.from_env(
        {
            "BATCHKV_MODEL": "m",
            "BATCHKV_ADAPTERS": "a=/one,b=/two",
            "BATCHKV_CACHE": "redis://:password@hub/0",
            "BATCHKV_CACHE_SECRET": "a secret of sixteen bytes",
            "BATCHKV_CACHE_SALT": "pepper",
        }
    )
    assert (settings.cache_secret, settings.cache_salt) == (b"a secret of sixteen bytes", b"pepper")
    assert not any(word in repr(settings) for word in ("password", "sixteen", "pepper"))
    off = {"BATCHKV_MODEL": "m", "BATCHKV_CACHE": "memory:"}
    assert WorkerSettings.from_env(off, cache="off").cache is None


def test_adapters_come_from_repeated_flags_or_one_variable() -> None:
    """Flags replace the variable; each adapter has a queue, after that of the model alone."""
    environ = {"BATCHKV_MODEL": "org/m", "BATCHKV_ADAPTERS": "x=/1,2,y=/3"}
    settings = WorkerSettings.from_env(environ, adapters=())
    assert settings.adapters == (Adapter("x", "/1,2"), Adapter("y", "/3"))
    assert list(settings.queues.items()) == [
        (redis_keys.queue_name("org/m"), ""),
        (redis_keys.queue_name("org/m@x"), "x"),
        (redis_keys.queue_name("org/m@y"), "y"),
    ]
    flags = WorkerSettings.from_env(environ, adapters=("z=/4", "w=~/5"))
    assert [str(adapter) for adapter in flags.adapters] == ["z=/4", "w=~/5"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "adapter x needs its folder"),
        ("x=", "adapter x has no folder"),
        ("x=/1,x=/2", "adapter x is named twice"),
        ("a/b=/1", "the adapter's name 'a/b' must"),
        ("=/1", "the adapter's name '' must"),
        (",".join(f"n{i}=/a" for i in range(65)), "65 adapters; a worker serves at most 64"),
    ],
)
def test_wrong_adapters_are_refused(text: str, words: str) -> None:
    """A name that cannot be, a missing folder and a name twice are refused with the variable."""
    with pytest.raises(SettingsError) as refused:
        WorkerSettings.from_env({"BATCHKV_MODEL": "m", "BATCHKV_ADAPTERS": text})
    assert str(refused.value).startswith("BATCHKV_ADAPTERS=") and words in str(refused.value)


def test_an_adapter_may_not_have_the_name_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be called like a model with an adapter. Its queue is not shared."""
    monkeypatch.chdir(tmp_path)
    Path("models/m@x").mkdir(parents=True)
    environ = {"BATCHKV_MODEL": "models/m", "BATCHKV_ADAPTERS": "x=/1"}
    with pytest.raises(SettingsError, match=r"--adapter x=/1: .*a folder has that name"):
        WorkerSettings.from_env(environ)
    alone = WorkerSettings.from_env({"BATCHKV_MODEL": "models/m@x"})
    assert list(alone.queues.values()) == [""]
    with pytest.raises(SettingsError, match=r"-m models/m --adapter y=FOLDER"):
        WorkerSettings.from_env({"BATCHKV_MODEL": "models/m@y"})
