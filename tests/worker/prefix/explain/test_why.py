"""``batchkv cache why``: each reason for which a prompt was computed, and the command itself."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.errors import Reason
from batchkv_cache_store.keys import BLOCK_TOKENS, Manifest, chain, namespace, next_key, root_key
from batchkv_cache_store.store import Store
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_producer.cli import cli
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.cache_note import CacheNote, token_marks
from batchkv_producer.wire.job import Result, Usage, encode_result
from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.prefix.explain.why import Explanation, from_look, from_result
from batchkv_worker.prefix.explain.why_look import Look
from cache_store.blocks import NAMESPACE, ROOT, make_block

MANIFEST: Manifest = {"format": 1, "model": "test"}  # of blocks.NAMESPACE
FIRST_TOKEN = 70_001  # so that no token id is like any other number that is printed
PROMPT = list(range(FIRST_TOKEN, FIRST_TOKEN + 3 * BLOCK_TOKENS + 1))
KEYS = chain(ROOT, PROMPT)
ENDED = 1_700_000_000
BUSY_MS = 4_000
BEFORE, DURING, AFTER = (ENDED * 1000 + ms for ms in (-3_600_000, -2_000, 7_200_000))
JOB_ID = "0123456789abcdef-7"


class Shelf:
    """One folder on disk, filled through a store as a worker does."""

    def __init__(self, folder: Path, max_bytes: int = 2**24) -> None:
        self.folder = folder
        self.tier = DiskTier(folder, max_bytes)
        self.store = Store([self.tier])

    def put(self, *blocks: Block) -> None:
        for block in blocks:
            assert self.store.publish(block)
        assert self.store.flush(10)

    def describe(self, *manifests: Manifest) -> None:
        for manifest in manifests:
            self.store.publish_manifest(manifest)
        assert self.store.flush(10)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    opened = Shelf(tmp_path / "cache")
    yield opened
    assert opened.store.close(10)


def stored(
    number: int,
    time_ms: int,
    tokens: Sequence[int] | None = None,
    kind: Kind = Kind.KV,
    root: bytes = ROOT,
    **changes: Any,
) -> Block:
    """The block of that number of the prompt, or one of other tokens in its place."""
    parent = chain(root, PROMPT)[number - 1] if number else root
    own = PROMPT[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
    block = make_block(own if tokens is None else tokens, parent, kind, number)
    return dataclasses.replace(block, time_ms=time_ms, **changes)


def parting(number: int, at: int) -> list[int]:
    """Tokens of the block of that number, other ones from that place on."""
    own = PROMPT[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
    return own[:at] + [token + 1_000_000 for token in own[at:]]


def ended(depth: int, stop: str, **changes: Any) -> Result:
    """The result of a job that had ``depth`` blocks, the first of them from its own memory."""
    local = min(depth, 1)
    note = CacheNote(NAMESPACE, len(KEYS), local, depth - local, stop)
    if depth < len(KEYS):
        low = depth * BLOCK_TOKENS
        note = dataclasses.replace(
            note,
            key=KEYS[depth],
            parent=KEYS[depth - 1] if depth else ROOT,
            marks=token_marks(PROMPT[low : low + BLOCK_TOKENS]),
        )
    values: dict[str, Any] = {
        "usage": Usage(len(PROMPT), 5, depth * BLOCK_TOKENS),
        "worker": "mini-1",
        "created": ENDED,
        "busy_ms": BUSY_MS,
        "note": note,
        "outcome": "ok",
    }
    return Result("row", "completion", **values | changes)


def explained(shelf: Shelf, result: Result, max_items: int = 1_000) -> Explanation:
    """What is concluded from the shelf, of a job that does not tell by itself."""
    assert from_result(result) is None and result.note is not None
    look = Look(result.note, max_items)
    look.add("disk:/here", shelf.tier)
    assert look.is_partial == (len(list(shelf.tier.iter_names())) > max_items)
    return from_look(result, look)


# What the job's result tells by itself


def test_a_worker_without_a_cache_and_a_prompt_too_short_are_told_apart() -> None:
    """Both leave no note: the length of the prompt decides."""
    without = from_result(ended(0, "", note=None))
    short = from_result(ended(0, "", note=None, usage=Usage(BLOCK_TOKENS, 5)))
    just = from_result(ended(0, "", note=None, usage=Usage(BLOCK_TOKENS + 1, 5)))
    assert without is not None and short is not None and just is not None
    assert (without.reason, short.reason, just.reason) == ("no_cache", "short", "no_cache")
    assert "BATCHKV_CACHE" in without.sentence and "256 tokens" in short.sentence


@pytest.mark.parametrize(
    ("depth", "stop", "sentence"),
    [
        (3, "", "all blocks were found: 3 blocks"),
        (1, "gated", "expected to take longer than computing"),
        (1, "rejected checksum", "the stored block 1 was refused: it is damaged"),
        (1, "rejected of_tomorrow", "was refused: of_tomorrow"),
        (0, "trouble redis", "the redis tier did not answer"),
        (0, "trouble lookup", "the lookup failed in the worker"),
        (2, "held", "another worker was computing block 2 and did not publish it in time"),
        (0, "slow", "the store did not answer in time"),
    ],
)
def test_some_reasons_need_no_look_at_the_tiers(depth: int, stop: str, sentence: str) -> None:
    """What the lookup ended with is enough."""
    found = from_result(ended(depth, stop))
    assert found is not None and sentence in found.sentence
    assert found.reason == (stop.partition(" ")[0] or "complete")


def test_each_reason_for_refusing_a_block_has_its_own_phrase() -> None:
    """No sentence has the name of a counter."""
    found = [from_result(ended(1, f"rejected {reason}")) for reason in Reason]
    sentences = {each.sentence for each in found if each is not None}
    assert len(sentences) == len(Reason)
    assert not any(sentence.endswith(f": {reason}") for sentence in sentences for reason in Reason)


# What is in the tiers


@pytest.mark.parametrize(
    ("time_ms", "words"),
    [(AFTER, "2 hours after the job had ended"), (DURING, "while the job ran")],
)
def test_a_block_published_since_tells_by_whom_and_when(
    shelf: Shelf, time_ms: int, words: str
) -> None:
    """It was not there at the time."""
    shelf.put(stored(0, BEFORE), stored(1, time_ms, writer="studio.local"))
    found = explained(shelf, ended(1, "missing kv 1"))
    assert found.reason == "published" and found.sentence.endswith(words)
    assert "block 1 was not stored then" in found.sentence
    assert "published by studio.local at 20" in found.sentence


def test_a_block_older_than_the_job_was_there_already(shelf: Shelf) -> None:
    """Its write was on its way, or it was not looked up."""
    shelf.put(stored(1, BEFORE))
    found = explained(shelf, ended(1, ""))
    assert found.reason == "present" and "59 minutes before the job began" in found.sentence


def test_the_prompt_parts_from_what_is_stored_at_a_token(shelf: Shelf) -> None:
    """The block with the longest common part says where."""
    shelf.put(*(stored(1, BEFORE, parting(1, at)) for at in (3, 200, 40)))
    found = explained(shelf, ended(1, "missing kv 1"))
    assert (found.reason, found.parts_at) == ("parted", 456)
    expected = "the prompt differs from those that are stored at token 456, in block 1"
    assert found.sentence == expected


def test_what_the_job_has_stored_itself_does_not_hide_where_it_parted(shelf: Shelf) -> None:
    """Most jobs have stored their missing block by the time that anybody asks."""
    young = stored(1, AFTER, parting(1, 250))
    shelf.put(stored(1, BEFORE, parting(1, 9)), stored(1, DURING), stored(2, DURING - 1), young)
    found = explained(shelf, ended(1, "missing kv 1"))
    assert (found.reason, found.parts_at) == ("parted", 265)
    assert "differs from those that were stored at token 265" in found.sentence
    assert "block 1 is stored now, published by mac.local at" in found.sentence


def test_tokens_that_differ_only_at_the_end_may_show_no_mark(shelf: Shelf) -> None:
    """One in 256 last tokens has the mark of another."""
    own = PROMPT[:BLOCK_TOKENS]
    alike = next(
        tokens
        for tokens in ([*own[:-1], token] for token in range(FIRST_TOKEN))
        if token_marks(tokens) == token_marks(own)
    )
    shelf.put(stored(0, BEFORE, alike))
    found = explained(shelf, ended(0, "missing kv 0"))
    assert (found.reason, found.parts_at) == ("parted", BLOCK_TOKENS - 1)
    assert "in the last tokens of block 0" in found.sentence


def test_blocks_that_follow_show_that_one_was_evicted(shelf: Shelf) -> None:
    """Also where others part from the prompt there, and where it was stored anew since."""
    shelf.put(stored(2, BEFORE), stored(1, BEFORE, parting(1, 9)))
    found = explained(shelf, ended(1, "missing kv 1"))
    assert found.reason == "evicted" and found.sentence.endswith("evicted or deleted")
    shelf.put(stored(1, DURING))
    found = explained(shelf, ended(1, "missing kv 1"))
    assert found.reason == "evicted" and found.sentence.endswith("while the job ran")


def test_a_block_that_the_job_stored_and_that_is_gone_was_evicted_since(shelf: Shelf) -> None:
    """Nothing else is known of the time of the lookup."""
    shelf.put(stored(0, BEFORE), stored(2, DURING))
    assert explained(shelf, ended(1, "missing kv 1")).reason == "evicted"


def test_another_tenants_chains_begin_elsewhere(shelf: Shelf) -> None:
    """The same tokens have other keys with another salt."""
    salted = root_key(NAMESPACE, b"another tenant's")
    shelf.put(stored(0, BEFORE, root=salted), stored(1, BEFORE, root=salted))
    found = explained(shelf, ended(0, "missing kv 0"))
    assert found.reason == "salt" and "salt differs" in found.sentence
    shelf.put(stored(0, DURING))
    assert explained(shelf, ended(0, "missing kv 0")).reason == "salt"


def described(**changes: Any) -> tuple[Manifest, bytes]:
    """A worker's manifest and its namespace."""
    manifest: Manifest = {
        "weights": "ab" * 32,
        "dtype": "bfloat16",
        "layers": ["affine4", "affine4", "affine4"],
        "block_tokens": 256,
        **changes,
    }
    return manifest, namespace(manifest)


def test_an_empty_namespace_is_compared_with_the_nearest(shelf: Shelf) -> None:
    """The fields that differ are named: values where they are short, and the first layer."""
    own, space = described()
    near, _ = described(layers=["affine4", "float", "float"], dtype="float16")
    far, _ = described(weights="cd" * 32, dtype="float16", block_tokens=128)
    result = ended(0, "missing kv 0")
    assert result.note is not None
    result = dataclasses.replace(result, note=dataclasses.replace(result.note, namespace=space))
    shelf.put(stored(0, BEFORE))  # of another namespace, whatever its parent
    assert explained(shelf, result).sentence.endswith("and no manifest describes these")
    shelf.describe(own)
    assert explained(shelf, result).sentence.endswith("and no other namespace has a manifest")
    shelf.describe(near, far)
    found = explained(shelf, result)
    assert found.reason == "namespace"
    assert found.sentence == (
        "no block of the worker's model and KV scheme is stored; the most similar namespace with a "
        "manifest differs in dtype (bfloat16 here, float16 there) and layers (first in layer 1)"
    )


def test_a_namespace_that_began_with_the_job_is_compared_too(shelf: Shelf) -> None:
    """By then its own blocks are there."""
    other, _ = described()
    shelf.put(stored(0, DURING), stored(1, DURING))
    assert "was stored, and no manifest" in explained(shelf, ended(0, "missing kv 0")).sentence
    shelf.describe(MANIFEST, other)
    found = explained(shelf, ended(0, "missing kv 0"))
    assert found.reason == "namespace" and "model (test here, nothing there)" in found.sentence
    assert "block 0 is stored now, published by mac.local" in found.sentence


def test_the_first_prompt_of_a_model_with_states_alone_met_an_empty_store(shelf: Shelf) -> None:
    """Its job has stored a state at the prompt's end, and none where the lookup began."""
    shelf.describe(MANIFEST)
    shelf.put(stored(2, DURING, kind=Kind.STATE))
    assert explained(shelf, ended(0, "missing state 0")).reason == "namespace"


@pytest.mark.parametrize("stop", ["missing kv 1", "missing kv 0", ""])
def test_what_left_no_trace_was_never_stored_or_evicted(tmp_path: Path, stop: str) -> None:
    """The tiers tell how much they have evicted."""
    shelf = Shelf(tmp_path / "small", 48 * 1024)
    shelf.put(*(stored(0, BEFORE, [number] * BLOCK_TOKENS) for number in range(40)))
    number = shelf.tier.stats().num_evicted
    found = explained(shelf, ended(1, stop))
    assert number > 10 and found.reason == "absent"
    assert f"disk:/here has evicted {number} blocks so far" in found.sentence
    assert shelf.store.close(10)


@pytest.mark.parametrize("others", [[stored(1, BEFORE)], [stored(2, BEFORE, kind=Kind.STATE)], []])
def test_a_state_is_kept_at_few_places(shelf: Shelf, others: list[Block]) -> None:
    """Neither the block's keys and values nor what follows it show that it had one."""
    shelf.put(stored(0, BEFORE), *others)
    found = explained(shelf, ended(1, "missing state 1"))
    assert found.reason == "no_state" and "and every 16 blocks" in found.sentence


def test_a_state_that_was_stored_since_is_named(shelf: Shelf) -> None:
    """The keys and values were there before, so that the prompt did not part there."""
    state = stored(1, DURING, kind=Kind.STATE)
    shelf.put(stored(1, BEFORE, parting(1, 5)), stored(1, BEFORE), state)
    found = explained(shelf, ended(1, "missing state 1"))
    assert found.reason == "no_state" and found.sentence.endswith("while the job ran")


def test_a_missing_window_is_named(shelf: Shelf) -> None:
    """The layers with a window have theirs beside the others' keys and values."""
    shelf.put(stored(0, BEFORE), stored(1, BEFORE))
    found = explained(shelf, ended(1, "missing window 1"))
    assert found.reason == "no_window" and "needs a window of that block" in found.sentence


def test_a_look_is_bounded_and_asks_for_the_block_all_the_same(shelf: Shelf) -> None:
    """Of what comes after the bound only the block itself is seen."""
    shelf.put(*(stored(1, BEFORE, parting(1, at)) for at in range(20)), stored(1, AFTER))
    assert explained(shelf, ended(1, "missing kv 1"), max_items=0).reason == "published"
    shelf.put(stored(0, DURING, parting(0, 3)))
    assert explained(shelf, ended(0, "missing kv 0"), max_items=0).reason == "absent"


def test_what_cannot_be_read_says_nothing(shelf: Shelf) -> None:
    """Cut short, or under another block's name."""
    block = stored(1, BEFORE, parting(1, 30))
    shelf.put(stored(0, BEFORE), block)
    path = next(shelf.folder.rglob(block_name(block.key, block.kind)))
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    shelf.tier.put(block_name(next_key(ROOT, [1]), Kind.KV), [data])
    shelf.tier.put(block_name(KEYS[1], Kind.KV), [data])
    assert explained(shelf, ended(1, "missing kv 1")).reason == "absent"


# The command


@pytest.fixture
def server(redis_url: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> str:
    """The queue's URL, alone in an environment that names the shelf's folder."""
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHKV_CACHE", f"memory: disk:{shelf.folder}?max=4MiB")
    return redis_url


def record(connection: Redis, result: Result) -> None:
    batch, line = JOB_ID.split("-")
    connection.hset(redis_keys.results(batch), line, encode_result(result))


def why(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(cli, ["cache", "why", JOB_ID, "--url", url, *arguments])


def test_the_command_explains_a_job(server: str, shelf: Shelf, redis_connection: Redis) -> None:
    """For people and as JSON, and without a token id."""
    record(redis_connection, ended(2, "missing kv 2"))
    shelf.put(stored(0, BEFORE), stored(1, BEFORE), stored(2, BEFORE, parting(2, 12)))
    shown = why(server)
    assert shown.exit_code == 0, shown.output
    whole = re.sub(r"\n {9,}", " ", shown.stdout)  # long lines are folded
    lines = dict(line.strip().split("  ", 1) for line in whole.splitlines())
    fields = {name: value.strip() for name, value in lines.items()}
    assert fields["worker"] == "mini-1" and fields["cached tokens"] == "512"
    assert [fields[name] for name in ("blocks", "from the worker's memory", "from the store")] == [
        *("3", "1", "1")
    ]
    expected = "the prompt differs from those that are stored at token 524, in block 2"
    assert fields["why"] == expected
    document = json.loads(why(server, "--json", "--tier", "disk").stdout)
    assert document["blocks"] == {"wanted": 3, "local": 1, "found": 1, "computed": 1}
    assert document["missing"] == {
        "block": 2, "token": 512, "key": KEYS[2].hex(), "parent": KEYS[1].hex(),
    }  # fmt: skip
    assert (document["reason"], document["parts_at"], document["is_partial"]) == (
        "parted",
        524,
        False,
    )
    assert not re.search(r"\b(10)?70\d{3}\b", shown.stdout + json.dumps(document))


def test_the_command_needs_no_cache_where_the_result_tells(
    server: str, redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a look at the tiers needs to know where they are."""
    monkeypatch.delenv("BATCHKV_CACHE")
    record(redis_connection, ended(0, "slow"))
    shown = why(server)
    assert shown.exit_code == 0 and "why" in shown.stdout
    record(redis_connection, ended(0, "", note=None))
    document = json.loads(why(server, "--json").stdout)
    assert (document["reason"], document["blocks"], document["missing"]) == ("no_cache", None, None)
    record(redis_connection, ended(0, "missing kv 0"))
    shown = why(server)
    assert (shown.exit_code, shown.stdout) == (2, "") and "BATCHKV_CACHE" in shown.stderr


def test_a_job_without_an_answer_is_one_sentence(server: str, redis_connection: Redis) -> None:
    """Unknown, running, failed."""
    shown = why(server)
    assert (shown.exit_code, shown.stderr) == (
        2,
        f"batchkv: no batch {JOB_ID.partition('-')[0]} on this server\n",
    )
    batch = {"digest": "0", "name": "n", "model": "m", "queue": "q", "total": 7, "num_chunks": 1}
    Transitions(redis_connection).create(JOB_ID.partition("-")[0], {**batch, "created": 1})
    redis_connection.hset(redis_keys.job(JOB_ID), "status", "started")
    shown = why(server)
    assert shown.exit_code == 1, shown.stderr
    assert shown.stderr == f"batchkv: no result yet: job {JOB_ID} is running\n"
    failed = ended(0, "", note=None, outcome="failed", error=("too_long", "much too long"))
    record(redis_connection, failed)
    shown = why(server)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr == (
        f"batchkv: job {JOB_ID} has no answer to explain: it is failed (too_long)\n"
    )


def test_a_failing_tier_is_reported(server: str, redis_connection: Redis, tmp_path: Path) -> None:
    """Nothing is concluded from a tier that was not seen; the exit code says so."""
    record(redis_connection, ended(0, "missing kv 0"))
    shown = why(server, "--cache", f"disk:{tmp_path / 'gone'}")
    assert (shown.exit_code, shown.stdout) == (2, "") and "no folder" in shown.stderr
    two = f"{os.environ['BATCHKV_CACHE']} unix:///no/such/socket"
    shown = why(server, "--cache", two, "--json")
    document = json.loads(shown.stdout)
    assert (shown.exit_code, document["reason"], document["is_partial"]) == (3, "absent", True)
    assert "none of failing tiers" in shown.stderr


def test_a_note_that_cannot_be_read_is_one_sentence(server: str, redis_connection: Redis) -> None:
    """Whatever stands in Redis."""
    whole = ended(0, "missing kv 0")
    assert whole.note is not None
    note = dataclasses.replace(whole.note, key=b"short")
    record(redis_connection, dataclasses.replace(whole, note=note))
    shown = why(server)
    assert (shown.exit_code, shown.stdout) == (1, "") and "cannot be read" in shown.stderr


def test_the_command_runs_without_mlx() -> None:
    """Results are read where no model runs."""
    program = (
        "import sys; sys.modules['mlx'] = None; import batchkv_worker.prefix.explain.why_cli; "
        "assert not {'mlx_lm', 'mlx.core'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
