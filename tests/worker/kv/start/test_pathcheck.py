"""Each attention path is compared with a float32 product before its time counts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as Path_
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.errors import ModelError
from batchkv_worker.kv.attention import shared_prefix
from batchkv_worker.kv.attention.paths import LayerAttention, Path, attend, in_slots, paths_of
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.kv.kernels.plain import PlainKernels
from batchkv_worker.kv.schemes.packing import LayerScheme, LayerShape, TensorScheme, fit_layer
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.start import check_tokens, layer_choice, pathcheck, probe
from batchkv_worker.kv.start.check_layers import layer_of
from batchkv_worker.kv.start.pathcheck import (
    LENGTHS,
    PREFIX,
    STORED,
    PathCheck,
    check_paths,
    check_prefix,
)
from worker.kv.record_backends import WithRecords
from worker.kv.reference import BACKEND

QUERY_HEADS = 4
SMALL = LayerShape(2, 32, 32)
Faulty = Callable[..., mx.array]


def scheme_of(name: str, shape: LayerShape = SMALL) -> LayerScheme:
    return fit_layer(SchemeSpec.parse(name).base, shape)


def check(name: str = "affine8", dtype: mx.Dtype = mx.float32) -> tuple[PathCheck, ...]:
    return pathcheck.check_paths(BACKEND, scheme_of(name), QUERY_HEADS, dtype)


def names_of_wrong(checks: tuple[PathCheck, ...]) -> set[str]:
    return {one.name for one in checks if not one.is_ok}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["float", "affine8", "affine2", "nvfp4", "turbo3"])
def test_right_paths_are_right_at_every_length(name: str) -> None:
    """With a mask and without, and so are the stored values; nothing comes near a tolerance."""
    checks = check(name)
    paths = paths_of(scheme_of(name))
    assert names_of_wrong(checks) == set()
    assert [(one.name, one.columns, one.is_masked) for one in checks[1:]] == [
        (path, columns, is_masked)
        for columns in LENGTHS
        for path in paths
        for is_masked in (True, False)
    ]
    assert checks[0].name == STORED
    assert all(one.error < one.tolerance / 20 for one in checks[1:])


def test_a_build_without_a_cpu_compares_with_the_devices_own_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paths are still checked: a fault that the plain products do not share shows."""

    def refuse(device: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(pathcheck, "LENGTHS", (100,))
    monkeypatch.setattr(check_tokens.mx, "stream", refuse)
    monkeypatch.setattr(pathcheck, "attend", only_for("packed", without_tail))
    check_tokens._computes_on_cpu.cache_clear()
    assert names_of_wrong(check()) == {"packed"}
    check_tokens._computes_on_cpu.cache_clear()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_has_tolerances_of_its_own(dtype: mx.Dtype) -> None:
    """What is rounded to the dtype differs by far more than float32, and stays below them."""
    checks = pathcheck.check_paths(GenericBackend(), scheme_of("float"), QUERY_HEADS, dtype)
    assert names_of_wrong(checks) == set()
    assert 2e-4 < max(one.error for one in checks[1:]) < checks[1].tolerance / 3


def without_tail(layer: LayerAttention, queries: mx.array, *rest: Any) -> mx.array:
    """Leaves out the columns after the last multiple of 64, as a kernel of MLX once did."""
    keys, values, scale, mask = rest
    whole = keys[0].shape[-2] // 64 * 64
    keys, values = (tuple(part[..., :whole, :] for part in parts) for parts in (keys, values))
    return attend(layer, queries, keys, values, scale, None if mask is None else mask[..., :whole])


def of_a_hidden_column(layer: LayerAttention, queries: mx.array, *rest: Any) -> mx.array:
    """Reads one column more than the mask shows."""
    *others, mask = rest
    if mask is not None:
        mask = mask | mx.concatenate([mask[..., 1:], mask[..., -1:]], axis=-1)
    return attend(layer, queries, *others, mask)


def of_a_free_slot(layer: LayerAttention, queries: mx.array, *rest: Any) -> mx.array:
    """Adds nothing of the row after each; of a free slot that is no number."""
    found = attend(layer, queries, *rest)
    return found + 0 * mx.roll(found, -1, axis=0)


def of_no_number(layer: LayerAttention, queries: mx.array, *rest: Any) -> mx.array:
    found = attend(layer, queries, *rest)
    return mx.where(mx.arange(found.shape[-1]) == 5, mx.array(float("nan")), found)


def of_zeros(layer: LayerAttention, queries: mx.array, *rest: Any) -> mx.array:
    """Nothing is launched from 1,024 columns on."""
    found = attend(layer, queries, *rest)
    return found * (rest[0][0].shape[-2] < 1024)


FAULTS: list[tuple[Faulty, set[int], bool]] = [
    (without_tail, {1_100, 4_200, 8_300}, True),
    (of_a_hidden_column, set(LENGTHS), False),
    (of_a_free_slot, set(LENGTHS), False),
    (of_no_number, set(LENGTHS), True),
    (of_zeros, {1_100, 4_200, 8_300}, True),
]


@pytest.mark.parametrize(("fault", "lengths", "shows_without_mask"), FAULTS)
def test_a_planted_fault_is_found(
    fault: Faulty, lengths: set[int], shows_without_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the lengths that have it, with a mask, and of that path alone."""
    monkeypatch.setattr(pathcheck, "attend", only_for("packed", fault))
    checks = check("affine8")
    assert names_of_wrong(checks) == {"packed"}
    masked = {one.columns for one in checks if not one.is_ok and one.is_masked}
    plain = {one.columns for one in checks if not one.is_ok and not one.is_masked}
    assert masked == lengths
    assert plain == (lengths if shows_without_mask else set())


def only_for(path: Path, fault: Faulty) -> Faulty:
    return lambda layer, *rest: (fault if layer.path == path else attend)(layer, *rest)


def test_whole_buffers_are_checked_where_slots_dequantize_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices and whole buffers, under Metal's backend; the packed path reads slices alone.

    A column more than is visible shows: it holds no number.
    """
    monkeypatch.setattr(pathcheck, "LENGTHS", (100,))
    backend, scheme = MetalBackend(), scheme_of("affine8")
    checks = pathcheck.check_paths(backend, scheme, QUERY_HEADS, mx.float32)
    assert names_of_wrong(checks) <= {"kernel"}  # which a device without Metal refuses
    counts = Counter(one.name for one in checks)
    assert counts == {STORED: 1, "fused": 4, "folded": 4, "packed": 2, "kernel": 2}
    layer = LayerAttention(backend, scheme, mx.float32, "folded")
    assert len(pathcheck.check_prefix(layer, QUERY_HEADS)) == 4
    real = pathcheck.sliced

    def of_one_more(buffers: Any, rows: int, columns: slice) -> Any:
        if buffers[0][0].dtype == mx.float32 and buffers[0][0].shape[-2] > 101:  # dense and whole
            columns = slice(columns.start - 1, columns.stop - 1)
        return real(buffers, rows, columns)

    monkeypatch.setattr(pathcheck, "sliced", of_one_more)
    checks = pathcheck.check_paths(backend, scheme, QUERY_HEADS, mx.float32)
    wrong = [one for one in checks if not one.is_ok and one.name != "kernel"]
    assert {one.name for one in wrong} == {"fused", "folded"}
    assert {one.error for one in wrong} == {float("inf")} and len(wrong) == 4


def test_columns_before_and_after_those_that_are_read_hold_no_numbers() -> None:
    """In every part of every scheme: whoever reads one more column shows it."""
    for name in ("float", "affine8", "mxfp8", "turbo3"):
        layer = LayerAttention(BACKEND, in_slots(scheme_of(name), "fused"), mx.float32)
        whole = [
            check_tokens._spoilt(
                tensor.pack(mx.ones((1, 2, 9, 32))),
                mx.arange(9).reshape(1, 1, -1, 1) % 8 == 0,
            )
            for tensor in (layer.scheme.keys, layer.scheme.values)
        ]
        for tensor, parts in zip((layer.scheme.keys, layer.scheme.values), whole, strict=True):
            dense = tensor.unpack(parts, mx.float32)
            is_number = mx.all(mx.isfinite(dense), axis=(0, 1, 3)).tolist()
            assert is_number == [False, *[True] * 7, False], name


def test_a_wrong_path_is_dropped_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is never timed, however fast, and the fused path is not used where it is the wrong one."""
    monkeypatch.setattr(pathcheck, "LENGTHS", (64, 100))
    timed: list[Path] = []

    def least_times(runs: list[Any], repeats: int) -> list[float]:
        *layers, _ = runs
        timed.extend(run.args[0] for run in layers)
        return [{"fused": 1.0, "folded": 3.0, "packed": 2.0}[run.args[0]] for run in layers] + [0.1]

    monkeypatch.setattr(probe, "least_times", least_times)
    for wrong, path, has_fused in (("fused", "packed", False), ("packed", "fused", True)):
        timed.clear()
        caplog.clear()
        monkeypatch.setattr(pathcheck, "attend", only_for(wrong, without_tail))  # type: ignore[arg-type]
        found = layer_choice.choose_path(
            "m", BACKEND, scheme_of("affine8"), QUERY_HEADS, mx.float32, 2, None
        )
        assert (found.path, found.has_fused) == (path, has_fused)
        assert wrong not in timed
        assert f"not used on this device: {wrong} differs by" in caplog.text
        assert "at 100 columns" in caplog.text


def test_rows_without_a_mask_do_not_take_a_wrong_fused_path() -> None:
    """Else that would serve rows of one length, which need no mask."""
    layer = LayerAttention(BACKEND, scheme_of("affine8"), mx.float32, "folded")
    assert layer.without_mask().path == "fused"
    wrong = LayerAttention(BACKEND, scheme_of("affine8"), mx.float32, "folded", has_fused=False)
    assert wrong.without_mask().path == "folded"


def test_no_path_left_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not served rather than served wrong."""
    monkeypatch.setattr(pathcheck, "LENGTHS", (100,))
    monkeypatch.setattr(pathcheck, "attend", without_tail)
    with pytest.raises(ModelError, match=r"cannot keep affine8.*fused differs.*another KV scheme"):
        layer_choice.choose_path(
            "m", BACKEND, scheme_of("affine8"), QUERY_HEADS, mx.float32, 2, None
        )


def test_values_that_are_stored_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths would agree with a reference that reads the same wrong parts."""
    pack = TensorScheme.pack
    monkeypatch.setattr(TensorScheme, "pack", lambda self, dense: pack(self, 0 * dense))
    monkeypatch.setattr(pathcheck, "LENGTHS", (64,))
    with pytest.raises(ModelError, match="stored values differs by 1 of the largest"):
        layer_choice.choose_path(
            "m", BACKEND, scheme_of("affine8"), QUERY_HEADS, mx.float32, 2, None
        )


@pytest.mark.parametrize("backend", [BACKEND, GenericBackend(), MetalBackend()])
def test_prompts_are_checked(backend: Backend) -> None:
    """The last tokens of a prompt of each length, over slices and over whole buffers."""
    checks = pathcheck.check_prefill(backend, scheme_of("affine8"), QUERY_HEADS, mx.float32)
    each = 1 + backend.reads_whole(1, 1)
    assert [one.columns for one in checks] == sorted(each * LENGTHS)
    assert names_of_wrong(checks) == set()
    assert all(one.error < one.tolerance / 20 for one in checks)


def test_wrong_prompts_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask that is one column off, or a tail left out; prefill has no other way."""
    real = GenericBackend.attention

    def one_off(self: Any, queries: mx.array, keys: mx.array, values: mx.array, *rest: Any) -> Any:
        return real(self, mx.roll(queries, 1, axis=2), keys, values, *rest)

    def tailless(self: Any, queries: mx.array, keys: mx.array, values: mx.array, *rest: Any) -> Any:
        last = mx.arange(keys.shape[2]).reshape(1, 1, -1, 1) >= keys.shape[2] // 64 * 64
        return real(self, queries, keys, mx.where(last, 0, values), *rest)

    for fault, lengths in ((one_off, set(LENGTHS)), (tailless, {1_100, 4_200, 8_300})):
        monkeypatch.setattr(GenericBackend, "attention", fault)
        what = GenericBackend(), scheme_of("affine8"), QUERY_HEADS, mx.float32
        wrong = {one.columns for one in pathcheck.check_prefill(*what) if not one.is_ok}
        assert wrong == lengths
        with pytest.raises(ModelError, match=r"cannot compute prompts of affine8.*version of MLX"):
            layer_choice.check_prompts("m", *what)


@pytest.mark.parametrize("name", ["float", "affine8", "turbo3"])
def test_shared_prefixes_are_checked(name: str) -> None:
    """Behind one prefix and behind a chain, at every length."""
    checks = pathcheck.check_prefix(prefix_layer(name), QUERY_HEADS)
    assert names_of_wrong(checks) == set()
    assert [(one.name, one.columns) for one in checks] == [
        (PREFIX, columns) for columns in LENGTHS for _ in range(2)
    ]
    assert all(one.error < one.tolerance / 20 for one in checks)


def prefix_layer(name: str) -> LayerAttention:
    return LayerAttention(BACKEND, in_slots(scheme_of(name), "folded"), mx.float32, "folded")


def test_a_wrong_shared_prefix_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tail left out, or a column of the rows' own that a mask hides."""
    real = shared_prefix.attend

    def without_prefix_tail(layer: Any, queries: Any, shared: Any, *rest: Any) -> mx.array:
        whole = [
            tuple(tuple(p[..., : p.shape[-2] // 64 * 64, :] for p in parts) for parts in both)
            for both in shared
        ]
        return real(layer, queries, whole, *rest)

    def of_hidden(layer: Any, queries: Any, shared: Any, own: Any, *rest: Any) -> mx.array:
        scale, mask, *others = rest
        mask = None if mask is None else mask | mx.roll(mask, -1, axis=-1)
        return real(layer, queries, shared, own, scale, mask, *others)

    for fault in (without_prefix_tail, of_hidden):
        monkeypatch.setattr(shared_prefix, "attend", fault)
        checks = pathcheck.check_prefix(prefix_layer("affine8"), QUERY_HEADS)
        wrong = {one.columns for one in checks if not one.is_ok}
        assert wrong == (set(LENGTHS) if fault is of_hidden else {1_100, 4_200, 8_300})
    assert not layer_choice.can_attend_prefixes(prefix_layer("affine8"), QUERY_HEADS)
    assert "rows do not share prefixes in attention on this device" in caplog.text


def test_a_check_is_told_in_one_sentence() -> None:
    """The log says which path, how far off, and where."""
    wrong = PathCheck("packed", 8_300, True, 0.25, 0.05)
    assert str(wrong) == (
        "packed differs by 0.25 of the largest number at 8,300 columns with a mask (at most 0.05)"
    )
    assert str(PathCheck(PREFIX, 64, False, float("inf"), 0.05)) == (
        "shared prefix gives what is no number at 64 columns"
    )
    refused = PathCheck("packed", 64, False, float("inf"), 0.05, "no kernel")
    assert str(refused) == "packed is refused at 64 columns: no kernel"
    for one in (wrong, refused):
        assert PathCheck.from_json(one.as_json()) == one


def test_checks_are_in_the_log_at_their_weight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is no warning: backends lack kernels, and that does no harm."""

    def picky(layer: LayerAttention, *rest: Any) -> mx.array:
        if layer.path == "packed":
            raise ValueError("no kernel")
        return attend(layer, *rest)

    monkeypatch.setattr(pathcheck, "LENGTHS", (64,))
    monkeypatch.setattr(pathcheck, "attend", picky)
    with caplog.at_level(logging.DEBUG, "batchkv.engine"):
        found = probe.choose(BACKEND, scheme_of("affine8"), QUERY_HEADS, mx.float32, num_rows=2)
    assert set(found.long) == {"fused", "folded"}
    levels = {one.levelno for one in caplog.records if "is refused at 64" in one.getMessage()}
    assert levels == {logging.DEBUG}


@dataclass(frozen=True, slots=True)
class FaultyKernels(PlainKernels):
    """Leaves something out, or is refused."""

    fault: str = ""

    def attend(self, queries: mx.array, records: mx.array, bounds: mx.array, *rest: Any) -> Any:
        if self.fault == "refused":
            raise RuntimeError("error: use of undeclared identifier 'x'")
        if self.fault == "last column":
            bounds = bounds - mx.array([0, 1])
        if self.fault == "first column":
            bounds = bounds + mx.array([1, 0])
        if self.fault == "prefixes":
            rest = (*rest[:3], None)
        return PlainKernels.attend(self, queries, records, bounds, *rest)


def with_kernels(fault: str) -> WithRecords:
    return WithRecords(make=lambda layout, _: FaultyKernels(layout, fault))


@pytest.mark.parametrize("name", ["float", "affine8", "turbo3"])
def test_a_right_kernel_passes_with_and_without_prefixes(name: str) -> None:
    """Free slots and the columns around a row's own hold no numbers, and it reads none of them."""
    scheme, backend = scheme_of(name), with_kernels("")
    checks = check_paths(backend, scheme, 4, mx.float32, [64, 576])
    assert pathcheck.is_right(checks, "kernel")
    assert sum(check.name == "kernel" for check in checks) == 4
    layer = layer_of(backend, scheme, 4 // scheme.shape.num_heads, mx.float32, "kernel")
    assert all(check.is_ok for check in check_prefix(layer, 4, [64, 576]))


@pytest.mark.parametrize("fault", ["last column", "first column"])
def test_a_kernel_that_leaves_a_column_out_is_seen(fault: str) -> None:
    """Though one column is little of many."""
    checks = check_paths(with_kernels(fault), scheme_of("affine8"), 4, mx.float32, [64, 1100])
    assert not any(check.is_ok for check in checks if check.name == "kernel" and check.is_masked)


def test_a_kernel_without_prefixes_is_seen() -> None:
    """Rows share no prefixes then."""
    scheme, backend = scheme_of("affine8"), with_kernels("prefixes")
    layer = layer_of(backend, scheme, 4 // scheme.shape.num_heads, mx.float32, "kernel")
    assert not any(check.is_ok for check in check_prefix(layer, 4, [64]))


@pytest.mark.parametrize("fault", ["refused", "last column"])
def test_a_kernel_that_fails_is_dropped_with_a_line(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other paths are left, and one of them is taken."""
    choice = probe.choose(with_kernels(fault), scheme_of("affine8"), 4, mx.float32, num_rows=2)
    assert choice.path != "kernel" and "kernel" not in choice.long
    (line,) = [one for one in caplog.messages if "attention path is not used" in one]
    assert "kernel" in line


def test_a_kernel_that_is_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time counts like that of any other path."""
    times = iter(range(100, 0, -1))
    monkeypatch.setattr(probe, "least_times", lambda ways, *_: [next(times) for _ in ways])
    choice = probe.choose(with_kernels(""), scheme_of("affine8"), 4, mx.float32, num_rows=2)
    assert choice.path == "kernel"
    read = probe.CHOICE.from_json(probe.CHOICE.to_json(choice))
    assert read == choice


def test_a_kernel_that_ends_starts_is_tried_twice(
    tmp_path: Path_, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that ends in the midst counts; one that comes to its end does not."""
    scheme = scheme_of("affine8")

    def start(*, ends: bool, is_anew: bool = False) -> Any:
        kept = Measurements.in_home(tmp_path, {}, is_anew=is_anew)
        backend = WithRecords(measurements=kept)
        with pytest.MonkeyPatch.context() as patch:
            if ends:
                patch.setattr(probe, "choose", lambda *_, **given: _end_of_process(given))
            choice = layer_choice.choose_path("m", backend, scheme, 4, mx.float32, 2, None)
        kept.end_tries()
        return choice

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            start(ends=True)
    assert start(ends=False).records is None
    assert "earlier starts ended while it was tried" in caplog.text
    with pytest.raises(KeyboardInterrupt):  # `batchkv tune` tries it again
        start(ends=True, is_anew=True)


def _end_of_process(given: dict[str, Any]) -> None:
    assert given["with_kernel"]
    raise KeyboardInterrupt
