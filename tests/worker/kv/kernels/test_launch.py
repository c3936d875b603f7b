"""What MLX is given for a kernel; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels import launch
from batchkv_worker.kv.kernels.body import (
    PACK,
    merge_body,
    place_rows_body,
    source_text,
    splits_body,
)
from batchkv_worker.kv.kernels.rotary import ROTARY
from worker.kv.kernels.cases import SCALE, Case, Sample

BODIES = [
    PACK,
    ROTARY,
    place_rows_body(3, 2),
    *(splits_body(matrices=one, joined=two) for one in (False, True) for two in (False, True)),
    *(merge_body(prefixes=one, sinks=True, alone=False) for one in (False, True)),
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each kernel that is made."""
    found: list[dict[str, Any]] = []

    def make(name: str, inputs: Any, outputs: Any, source: str, **rest: Any) -> Any:
        found.append({"name": name, "inputs": inputs, "source": source, **rest})
        return lambda **given: [mx.zeros(shape) for shape in given["output_shapes"]]

    for dialect in ("metal", "cuda"):
        monkeypatch.setattr(mx.fast, f"{dialect}_kernel", make)
        getattr(launch, f"{dialect}_launch").cache_clear()
    yield found
    for dialect in ("metal", "cuda"):
        getattr(launch, f"{dialect}_launch").cache_clear()


@pytest.mark.parametrize("run", [launch.metal_launch, launch.cuda_launch])
def test_each_kernel_is_made_once(run: launch.Launch, made: list[dict[str, Any]]) -> None:
    """With strides instead of copies, and a name that no other source has."""
    for body in BODIES * 2:
        inputs = [mx.zeros((8,))] * len(body.inputs)
        kernel = run(body, (("N", 1), ("T", mx.bfloat16)))
        (found,) = kernel(inputs, (1, 1, 1), (1, 1, 1), [((2, 3), mx.float32)])
        assert found.shape == (2, 3)
    assert len(made) == len({one["name"] for one in made}) == len(BODIES)
    for one in made:
        assert not one["ensure_row_contiguous"]
        assert one["source"].startswith("constexpr int N = 1;\nusing T = ")


def test_a_name_changes_with_its_source(
    made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX keeps compiled kernels by name, so another version must not find them."""
    text = launch.source_text
    for change, constant in (("", 1), ("", 2), ("\n", 2)):
        monkeypatch.setattr(launch, "source_text", lambda name, change=change: text(name) + change)
        launch.metal_launch.cache_clear()
        launch.metal_launch(PACK, (("N", constant),))
    assert len({given["name"] for given in made}) == 3


def test_sources_are_short() -> None:
    """MLX copies a kernel's source at each call."""
    for body in BODIES:
        source, functions = body.source("metal_start"), body.functions
        assert len(source) + len(functions) < 22_000
        assert len(body.included_source("cuda_start") + body.included_functions) < 2_000
        assert not any(line.startswith((" ", "//")) for line in source.splitlines())
        assert all(f"{name}" in source for name in body.inputs)


def test_a_compiler_that_reads_files_gets_the_same_source() -> None:
    """The files exist, and the shapes and strides that they use are named."""
    for body in BODIES:
        whole = body.source("cuda_start"), body.functions
        short = body.included_source("cuda_start"), body.included_functions
        for text, lines in zip(whole, short, strict=True):
            files = [line.split('"')[1] for line in lines.splitlines() if "#include" in line]
            read = "".join(source_text(Path(file).stem) for file in files)
            assert all(Path(file).is_file() for file in files) and text.endswith(read)
        used = [f"{name}_{what}" for name in body.inputs for what in ("shape", "strides")]
        assert [one for one in used if one in whole[0]] == [one for one in used if one in short[0]]


def test_mlx_takes_the_kernels_with_their_arguments(tmp_path: Path) -> None:
    """MLX records them in an exported function, for which it needs no GPU."""
    case = Case("affine8", "affine4", mx.bfloat16, 64, 64, 4, 1, True, 5, 1)
    sample, kernels = Sample.of(case, (300,)), case.kernels(launch.metal_launch)
    assert sample.partials is not None
    parts = case.layout.split(sample.records)
    mx.eval(parts)
    places = mx.array([(0, 10, 310, -10), (0, 0, 0, 0)], mx.int32)

    def run(queries: mx.array, records: mx.array, scores: mx.array) -> list[mx.array]:
        partials = replace(sample.partials, scores=scores)
        given = queries, records, sample.bounds
        found = [kernels.attend(*given, n, SCALE, sample.sinks, partials) for n in (256, 300)]
        found += kernels.attend_alone(queries, records, sample.bounds, 300, SCALE)
        found += [kernels.pack(queries[:, :2], queries[:, :2])]
        return [*found, kernels.place_rows(places, *parts, 1, 320)]

    file = tmp_path / "kernels.mlxfn"
    mx.export_function(str(file), run, sample.queries, sample.records, sample.partials.scores)
    assert b"CustomKernel" in file.read_bytes()
