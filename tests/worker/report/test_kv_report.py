"""``batchkv kv-report``: its figures are right for every kind of cache; its errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from mlx_lm.models.cache import KVCache

from batchkv_worker.cli import kv_report_command, scheme_names
from batchkv_worker.errors import ModelError, SettingsError
from batchkv_worker.kv.attention.paths import Path as AttentionPath
from batchkv_worker.kv.backends import timing
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.start.decision import Fixed
from batchkv_worker.kv.start.plan import KvPlan, make_plan
from batchkv_worker.report import kv_report, speed
from batchkv_worker.report.capture import AttentionSample
from batchkv_worker.report.kv_report import Extent, measure
from batchkv_worker.report.quality import read
from batchkv_worker.report.results import Report
from batchkv_worker.report.show import NOTE, show
from benchmarks.bench_kv import BYTES_TO_FLOAT, live_bytes, small_model
from parity.few import few
from support.tiny_models import VOCABULARY, build, loaded
from worker.kv.reference import BACKEND

SMALL = Extent(tokens=96, rows=2, row_tokens=40)
TOKENS = [(7 * i * i + 3 * i) % VOCABULARY for i in range(96)]


@pytest.fixture(autouse=True)
def _one_short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the timing, because times are not tested here."""
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "LEAST_TURNS", 1)  # of a plan's choices
    monkeypatch.setattr(timing, "MOST_SECONDS", 0.0)


def report_of(family: str, *schemes: str) -> Report:
    return measure(loaded(build(family)), schemes, "numbers", TOKENS, SMALL)


def test_memory_is_limited_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Mac, MLX would keep most of the machine's memory, as in a worker without limits.

    Weights are unpacked where a worker unpacks them.
    """
    limited: list[bool] = []
    unpacked: list[Any] = []

    def load(name: str, dtype: str, *, before_reading: Callable[..., object]) -> Any:
        assert limited == [False]
        before_reading(name, mx.float32)
        raise ModelError("far enough")

    def unpack(_: object, model: Any, dtype: mx.Dtype) -> int:
        unpacked.append((model, dtype))
        return 0

    monkeypatch.setattr(GenericBackend, "unpack_weights", unpack)

    monkeypatch.setattr(
        kv_report.device, "prepare_device", lambda *, wired_limit: limited.append(wired_limit)
    )
    monkeypatch.setattr(kv_report, "load", load)
    with pytest.raises(ModelError, match="far enough"):
        kv_report.report("m", ["affine8"], None, "auto", SMALL, lambda _: None)
    assert unpacked == [("m", mx.float32)]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(kv_report_command, list(arguments))


def test_the_demo_model_is_measured() -> None:
    """Fewer bits take fewer bytes and have larger errors; 8 bits change little; JSON parses."""
    size = ("--tokens", "200", "--rows", "2", "--row-tokens", "64")
    said = command("-m", "demo", "--schemes", "affine8,turbo3,float", "--json", *size)
    assert said.exit_code == 0, said.output
    notes = [line for line in said.stderr.splitlines() if "measuring" in line]
    names = ("float", "affine8", "turbo3")
    assert notes == [f"batchkv: measuring {one} ({at} of 3)" for at, one in enumerate(names, 1)]
    document: dict[str, Any] = json.loads(said.stdout)
    assert document["text_tokens"] == 200 and document["layers"] == "4 full attention"
    schemes = {one["scheme"]: one for one in document["schemes"]}
    assert list(schemes) == ["float", "affine8", "turbo3"]
    nbytes = [one["bytes_per_token"] for one in schemes.values()]
    # 4 layers, keys and values, 2 heads of 64 numbers; scales and biases for each 64 of them.
    assert nbytes == [8 * 2 * size for size in (256, 64 + 8, 24 + 4)]
    errors = [one["error"]["mean"] for one in schemes.values()]
    assert errors[0] == 0 < errors[1] < 0.02 < errors[2] < 0.3
    assert all(one["error"]["worst"] >= one["error"]["mean"] for one in schemes.values())
    assert abs(schemes["affine8"]["quality"]["perplexity_change"]) < 0.02
    assert schemes["float"]["quality"]["perplexity_change"] == 0
    assert schemes["affine8"]["quality"]["same_prediction"] > 0.9
    for one in schemes.values():
        assert one["step"]["milliseconds"] > 0 and one["attention"]["ratio"] > 0
        assert set(one["paths"]) <= set(get_args(AttentionPath))


@pytest.mark.parametrize(
    ("family", "kinds", "paths"),
    few(
        [
            ("qwen3_next", {"state": 2, "full attention": 2}, None),
            ("gemma3_text", {"window of 24": 2, "full attention": 2}, None),
            ("gemma4_text", {"window of 24": 2, "full attention": 2}, None),
            ("gemma3n", {"window of 24": 2, "full attention": 2}, None),
            ("deepseek_v3", {"full attention": 2}, ("dense",)),
            ("deepseek_v32", {"full attention": 4}, ("dense",)),
        ],
        3,
    ),
)
def test_every_kind_of_cache_is_measured(
    family: str, kinds: dict[str, int], paths: tuple[str, ...] | None
) -> None:
    """States, windows, latents, shared keys and dense models are measured by kind of layer."""
    exact, eight = report_of(family, "affine8").schemes
    for one in (exact, eight):
        assert {kind.kind: kind.layers for kind in one.kinds} == kinds
        assert paths is None or one.paths == paths
        for kind in one.kinds:
            is_state = kind.kind == "state"
            assert (kind.bytes_per_row > 0) is is_state and (kind.bytes_per_token == 0) is is_state
    # An index that chooses tokens stays float.
    least = 1.3 if family == "deepseek_v32" else 3
    assert exact.bytes_per_token > least * eight.bytes_per_token
    assert exact.error and eight.error
    assert exact.error.worst == 0 < eight.error.mean <= eight.error.worst < 0.2
    assert eight.quality.perplexity == pytest.approx(exact.quality.perplexity, rel=0.05)


def test_a_model_without_attention_has_no_error() -> None:
    """A model with states only: every scheme is the same, and there is no error."""
    exact, four = report_of("mamba2", "affine4").schemes
    assert four.error is None and four.attention is None and four.paths == ()
    assert four.bytes_per_token == 0 and four.quality == exact.quality
    show(report_of("mamba2", "affine4"))


def plan_of(model: Any, caches: CacheTree, scheme: str) -> KvPlan:
    fixed = Fixed("fused")
    return make_plan("tiny", model, caches, scheme, mx.float32, BACKEND, slots=2, fixed=fixed)


def test_the_error_is_that_of_rounded_keys_and_values() -> None:
    """The attention of layer 0 with values rounded by hand has exactly the reported error."""
    model = build("llama", num_hidden_layers=1)
    ready = loaded(model)
    plans = [plan_of(model, ready.caches, name) for name in ("float", "affine4")]
    calls = type(model.layers[0].self_attn).__call__
    sample = AttentionSample(BACKEND, model, ready.caches, plans[0].kinds, TOKENS)
    assert type(model.layers[0].self_attn).__call__ is calls  # as it was before
    found = sample.error(plans[1].kinds)

    class Rounded(KVCache):  # type: ignore[misc]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            rounded = (
                mx.dequantize(*mx.quantize(x, group_size=64, bits=4), group_size=64, bits=4)
                for x in super().update_and_fetch(keys, values)
            )
            return tuple(rounded)

    layer = model.layers[0]
    inputs = layer.input_layernorm(model.model.embed_tokens(mx.array([TOKENS])))
    wanted = layer.self_attn(inputs, "causal", KVCache())
    rounded = layer.self_attn(inputs, "causal", Rounded())
    error = mx.linalg.norm(rounded - wanted) / mx.linalg.norm(wanted)
    assert found is not None and found.worst_layer == 0
    assert found.mean == found.worst == pytest.approx(error.item(), rel=1e-3)


def test_perplexity_is_the_models_own() -> None:
    """In float, in chunks with batchkv's caches, it equals one run of the model without a cache."""
    model = build("gemma3_text")
    ready = loaded(model)
    tokens = TOKENS * 4  # more than one chunk, and longer than the window
    plan = plan_of(model, ready.caches, "float")
    found = read(BACKEND, model, ready.caches, plan.kinds, tokens)
    logits = model(mx.array([tokens]))[0, :-1]
    said = mx.take_along_axis(logits, mx.array(tokens[1:])[:, None], axis=-1)[:, 0]
    loss = float((mx.logsumexp(logits, axis=-1) - said).mean())
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert len(found.predictions) == len(tokens) - 1 and found.agreement(found) == 1


def test_tables_name_every_scheme(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file gets plain columns and a terminal a drawn table, with the same contents."""
    found = report_of("qwen3_next", "affine4,last=float")
    show(found)
    plain = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(found)
    drawn = capsys.readouterr().out
    assert "│" in drawn and "│" not in plain
    for text in (plain, drawn):
        assert "affine4,last=float" in text and "2 x full attention" in text
        assert "affine4/g64," in text and "2 x state" in text
        assert text.endswith(NOTE)
    assert max(map(len, plain.splitlines())) <= 80
    (wide,) = (kind for kind in found.schemes[1].kinds if "attention" in kind.kind)
    kinds = (replace(wide, fitted="affine8/g64+affine4/g64, turbo3.5/g128"),)
    show(replace(found, schemes=(replace(found.schemes[1], kinds=kinds),)))
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80  # drawn for 160 columns
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    show(replace(found, schemes=(replace(found.schemes[1], kinds=kinds),)))
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert "affine8/g64+" in narrow and "turbo3.5/g128" in narrow


def test_overrides_stay_with_their_scheme() -> None:
    """Commas separate schemes, and a scheme's overrides, too; blanks and repeats do not matter."""
    assert scheme_names("affine4, last = float,turbo3") == ["affine4,last=float", "turbo3"]
    assert scheme_names("k8v4,K8V4") == ["affine8+affine4"] * 2
    for text in ("last=float", "affine9", ""):
        with pytest.raises(SettingsError, match=r"^--schemes .*KV scheme"):
            scheme_names(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-m", "demo", "--schemes", "affine8,int3"), "--schemes affine8,int3: unknown KV scheme"),
        (("-m", "demo", "--schemes", "affine4,9=float"), "this model's are 0 to 3"),
        (("-m", "./nowhere"), "model './nowhere' is not a folder"),
        (("-m", "demo", "--text", "nowhere.txt"), "--text nowhere.txt: the file cannot be read"),
        (("-m", "demo", "--text", "."), "--text .: the file cannot be read: Is a directory"),
        (("-m", "demo", "--text", "empty.txt"), "--text empty.txt: the file has no text"),
        (("-m", "demo", "--text", "bytes.bin"), "--text bytes.bin: the file is not UTF-8 text"),
        (("-m", "demo", "--text", "short.txt"), "--text short.txt: has 2 tokens; at least 32"),
    ],
)
def test_faults_are_one_line(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the configuration is exit code 2 and one line that names the fault."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n", "utf-8")
    Path("bytes.bin").write_bytes(b"\xff\xfe\x00")
    Path("short.txt").write_text("a b", "utf-8")
    said = command(*arguments)
    assert said.exit_code == 2
    *notes, last = said.stderr.splitlines()
    assert last.startswith("batchkv: ") and says in last and said.stdout == ""
    assert all(note.startswith("batchkv: loading ") for note in notes) and len(notes) < 2


def test_the_command_needs_no_mlx_to_be_listed() -> None:
    """Help, and the error of an unknown scheme, come before MLX is imported."""
    code = (
        "import sys; from batchkv_worker.cli import kv_report_command, scheme_names; "
        "scheme_names('affine4'); sys.exit('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_slots_take_the_bytes_that_their_scheme_promises() -> None:
    """The live bytes of an engine's slots in float16, relative to float, are as promised."""
    model = small_model(mx.float16, layers=2, context=512)
    prompts = [40, 200]
    whole = live_bytes(model, "float", prompts)
    # 2 rows of 256 columns, 2 layers, keys and values, 2 heads of 128 numbers.
    assert whole == 2 * 256 * 2 * 2 * 2 * 128 * 2
    for scheme in ("affine8", "k8v4", "affine4", "turbo3.5"):
        assert live_bytes(model, scheme, prompts) <= BYTES_TO_FLOAT[scheme] * whole, scheme
