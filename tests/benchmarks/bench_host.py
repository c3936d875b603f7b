"""The host's part of a decode step and of a prompt's chunk: Python, primitives, launches.

    python tests/benchmarks/bench_host.py [--quick] [--only PART] [--apart] [--json FILE]

A GPU's host builds a graph for each step and starts its kernels. Here graphs are built and never
computed, for a model of 36 layers with the heads of Qwen3-4B and tiny widths, on a backend that
chooses shapes as CUDA does. So the table has the host's time alone, and needs no GPU.

``decode``   a step of 32 rows of unequal length
``shared``   the same after a shared prefix
``first``    the only chunk of four prompts
``behind``   the same after a prefix that they share
``chunk``    a chunk of four prompts that have history
``insert``   four computed prompts of unequal length enter slots
``gaps``     16 of 64 rows go to free slots below them, with the waits for the device

``again`` is a step whose graph was traced before. ``kernel`` is decode with our own kernels.

``microseconds`` are the thread's time for building the graph, in Python and in MLX, the median of
many. ``primitives`` are those of the graph; ``launches`` leaves out those that are views. Functions
with a kernel of their own on a GPU count as one primitive (``GpuGraph``). Copies are not counted
that such a kernel makes of arrays that do not lie in one piece.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchkv_worker.kv.backends import blas

blas.load()

import mlx.core as mx  # noqa: E402
from mlx_lm.models import qwen3  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

from batchkv_worker.kv.attention.paths import Path as AttentionPath  # noqa: E402
from batchkv_worker.kv.backends.contract import (  # noqa: E402
    Change,
    ChunkKernels,
    Pacing,
    RecordKernels,
)
from batchkv_worker.kv.backends.cuda.backend import CudaBackend  # noqa: E402
from batchkv_worker.kv.backends.gpu.fused_linear import FuseLinears  # noqa: E402
from batchkv_worker.kv.backends.gpu.fused_rotary import FuseRotary  # noqa: E402
from batchkv_worker.kv.backends.gpu.residual_blocks import FuseResiduals  # noqa: E402
from batchkv_worker.kv.backends.launching import Launches  # noqa: E402
from batchkv_worker.kv.backends.measurements import Codec, Measurements  # noqa: E402
from batchkv_worker.kv.backends.pacing import UNPACED  # noqa: E402
from batchkv_worker.kv.kernels.body import Body  # noqa: E402
from batchkv_worker.kv.kernels.chunk import ChunkKernel  # noqa: E402
from batchkv_worker.kv.kernels.decode import DecodeKernels  # noqa: E402
from batchkv_worker.kv.kernels.launch import (  # noqa: E402
    Constant,
    Input,
    Output,
    Run,
    Size,
    arrays_of,
)
from batchkv_worker.kv.kernels.layout import RecordLayout  # noqa: E402
from batchkv_worker.kv.kernels.plain import (  # noqa: E402
    PlainChunks,
    PlainKernels,
    plain_residual,
    plain_rotary,
)
from batchkv_worker.kv.layers import step_graphs  # noqa: E402
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill  # noqa: E402
from batchkv_worker.kv.layers.contract import Chunk  # noqa: E402
from batchkv_worker.kv.layers.discover import discover  # noqa: E402
from batchkv_worker.kv.layers.prefill_rows import PrefillRows  # noqa: E402
from batchkv_worker.kv.schemes.packing import LayerScheme  # noqa: E402
from batchkv_worker.kv.slots.changes import Arrival, Arrivals, Demand  # noqa: E402
from batchkv_worker.kv.start.decision import Fixed  # noqa: E402
from batchkv_worker.kv.start.plan import KvPlan, make_plan  # noqa: E402
from batchkv_worker.kv.types import PackedKV, Pieces  # noqa: E402

SCHEMES = ("float", "affine8", "turbo4", "float kernel", "affine8 kernel")
PARTS = ("decode", "shared", "first", "behind", "chunk", "insert", "gaps")
LAYERS, ROWS, PROMPTS = 36, 32, 4
CHECKED_LAYERS = 2
ROWS_WITH_GAPS = 64
PREFIX, OWN, CHUNK = 64, 32, 32  # tokens
_VIEWS = {"Slice", "Reshape", "Broadcast", "Transpose", "ExpandDims", "Squeeze", "Flatten"}
_VIEWS |= {"Unflatten", "View", "AsStrided", "Split", "StopGradient"}
_STANDS = {"Depends", "Sign", "Floor"}  # for the functions of ``GpuGraph``
FAST = ("rms_norm", "rope", "scaled_dot_product_attention")
_LABEL = re.compile(r'\[label ="([^"]*)"')


class Checks(Measurements):
    """The results of checks, whatever number of layers was checked."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, Any] = {}

    def of(self, name: str, measure: Callable[[], Any], codec: Codec[Any]) -> Any:
        check = name.partition(" with ")[0]  # then it counts layers
        if check not in self._found:
            self._found[check] = measure()
        return self._found[check]


class HostBackend(CudaBackend):
    """Shapes and products as on CUDA; nothing is measured, and nothing waits for the device."""

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        layers = [f"model.layers.{number}.self_attn" for number in range(len(model.layers))]
        projections = tuple(tuple(f"{layer}.{name}_proj" for name in "qkv") for layer in layers)
        heads = tuple((f"{layer}.q_norm", f"{layer}.k_norm", f"{layer}.rope") for layer in layers)
        rotary = FuseRotary(heads, _launch_rotary, takes_chunks=True)
        return FuseLinears(projections, rows), rotary, FuseResiduals(_launch_residual, True, True)

    def pacing(self, launches: Launches) -> Pacing:
        return UNPACED

    def chunk_kernels(self, scheme: LayerScheme, dtype: mx.Dtype) -> ChunkKernels | None:
        try:
            return HostChunks(scheme, dtype)
        except ValueError:
            return None

    def record_kernels(self, scheme: LayerScheme, lines: int, dtype: mx.Dtype) -> RecordKernels:
        return HostKernels(RecordLayout.of(scheme, dtype), lines)


class HostKernels:
    """Plain operations at start, and one launch for each kernel where graphs are a GPU's."""

    graph: GpuGraph | None = None  # while one is active

    def __init__(self, layout: RecordLayout, lines: int) -> None:
        self.layout = layout
        self._plain = PlainKernels(layout)
        self._kernels = DecodeKernels.of(layout, lines, _launch, counts=True)

    def attend(self, *args: Any, **kwargs: Any) -> mx.array:
        kernels = self._plain if HostKernels.graph is None else self._kernels
        return kernels.attend(*args, **kwargs)

    def attend_alone(self, *args: Any) -> tuple[mx.array, mx.array]:
        kernels = self._plain if HostKernels.graph is None else self._kernels
        return kernels.attend_alone(*args)

    def place_rows(self, *args: Any) -> mx.array:
        kernels = self._plain if HostKernels.graph is None else self._kernels
        return kernels.place_rows(*args)

    def pack(self, keys: mx.array, values: mx.array) -> mx.array:
        kernels = self._plain if HostKernels.graph is None else self._kernels
        return kernels.pack(keys, values)


class HostChunks:
    """The same for chunks of prompts."""

    def __init__(self, scheme: LayerScheme, dtype: mx.Dtype) -> None:
        """ValueError where there is no kernel for such a layer."""
        self._kernel = ChunkKernel.of(RecordLayout.of(scheme, dtype), _launch)
        self._plain = PlainChunks(scheme, dtype)

    def pack(self, *args: Any) -> PackedKV:
        return (self._plain if HostKernels.graph is None else self._kernel).pack(*args)

    def pack_and_give(self, *args: Any) -> tuple[PackedKV, tuple[mx.array, mx.array]]:
        return (self._plain if HostKernels.graph is None else self._kernel).pack_and_give(*args)


def _launch(body: Body, constants: tuple[Constant, ...]) -> Run:
    def run(
        inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
    ) -> list[mx.array]:
        assert HostKernels.graph is not None
        return HostKernels.graph.launch(arrays_of(inputs), outputs)

    return run


def _either(plain: Run, launched: Run) -> Run:
    """Plain operations at start, and one launch where graphs are a GPU's."""

    def run(
        inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
    ) -> list[mx.array]:
        way = plain if HostKernels.graph is None else launched
        return way(inputs, grid, group, outputs)

    return run


def _launch_rotary(body: Body, constants: tuple[Constant, ...]) -> Run:
    return _either(plain_rotary(body, constants), _launch(body, constants))


def _launch_residual(body: Body, constants: tuple[Constant, ...]) -> Run:
    return _either(plain_residual(body, constants), _launch(body, constants))


@dataclass(frozen=True, slots=True)
class Cost:
    """The host's cost of one graph."""

    microseconds: float
    primitives: int
    launches: int
    kinds: dict[str, int]


def build_model(layers: int) -> Any:
    """Qwen3-4B's layers and heads with tiny widths, in bfloat16."""
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=32,
        rms_norm_eps=1e-6,
        vocab_size=128,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    mx.random.seed(0)
    model = qwen3.Model(args)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


# -- what is one primitive on a GPU, and many on a CPU


class GpuGraph:
    """Stands for functions of MLX: one primitive each, as on a GPU.

    ``calls`` counts them. Results have the right shapes and depend on the inputs that are packed
    keys and values. Nothing is computed.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._like: dict[Any, list[mx.array]] = {}
        self._real = {name: getattr(mx, name) for name in ("quantize", "dequantize")}
        self._fast = {name: getattr(mx.fast, name) for name in FAST}

    def quantize(self, x: mx.array, group_size: int = 64, bits: int = 4, **mode: Any) -> Any:
        self.calls["Quantize"] += 1
        key = (x.shape, x.dtype, group_size, bits)
        if key not in self._like:
            zeros = mx.zeros(x.shape, x.dtype)
            parts = self._real["quantize"](zeros, group_size=group_size, bits=bits, **mode)
            mx.eval(parts)
            self._like[key] = list(parts)
        return mx.depends(self._like[key], [x])

    def dequantize(
        self,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None = None,
        group_size: int = 64,
        bits: int = 4,
        **_: Any,
    ) -> mx.array:
        self.calls["Dequantize"] += 1
        shape = (*w.shape[:-1], w.shape[-1] * 32 // bits)
        key = (shape, scales.dtype)
        if key not in self._like:
            self._like[key] = [mx.zeros(shape, scales.dtype)]
            mx.eval(self._like[key])
        inputs = [w, scales] if biases is None else [w, scales, biases]
        return mx.depends(self._like[key], inputs)[0]

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        self.calls["RMSNorm"] += 1
        return mx.sign(x)

    def rope(self, x: mx.array, dims: int, **_: Any) -> mx.array:
        self.calls["RoPE"] += 1
        return mx.floor(x)

    def scaled_dot_product_attention(
        self, q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **_: Any
    ) -> mx.array:
        self.calls["Attention"] += 1
        return mx.depends([q], [k, v, mask] if isinstance(mask, mx.array) else [k, v])[0]

    def launch(self, inputs: list[mx.array], outputs: Sequence[Output]) -> list[mx.array]:
        """One of our own kernels; MLX formats and hashes its source besides."""
        self.calls["Kernel"] += 1
        key = tuple(outputs)
        if key not in self._like:
            self._like[key] = [mx.zeros(shape, dtype) for shape, dtype in outputs]
            mx.eval(self._like[key])
        found: list[mx.array] = mx.depends(self._like[key], inputs)
        return found

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, graphs are as on a GPU."""
        for module, names in ((mx, self._real), (mx.fast, self._fast)):
            for name in names:
                setattr(module, name, getattr(self, name))
        HostKernels.graph = self
        try:
            yield
        finally:
            HostKernels.graph = None
            for module, names in ((mx, self._real), (mx.fast, self._fast)):
                for name, real in names.items():
                    setattr(module, name, real)


def kinds_of_graph(arrays: Sequence[mx.array]) -> Counter[str]:
    """Primitives of a graph by name."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return Counter(_LABEL.findall(text.getvalue()))


def launches_of(kinds: Counter[str], calls: Counter[str]) -> Counter[str]:
    """The primitives that are no views; those that stand for others by the names of the others."""
    none = _VIEWS | _STANDS
    left = {name: n for name, n in kinds.items() if name.split(" ")[0] not in none}
    calls = Counter(calls)
    # Dequantized arrays may stay unread, so those in the graph are counted.
    others = calls["Quantize"] + calls["Attention"] + calls["Kernel"]
    calls["Dequantize"] = kinds["Depends"] - others
    return Counter({**left, **+calls})


# -- the parts


def _kept(layers: Sequence[Any]) -> Callable[[], None]:
    """Returns a function that gives the layers back the attributes that they have now."""
    held = [{name: _copied(value) for name, value in vars(one).items()} for one in layers]

    def restore() -> None:
        for layer, attributes in zip(layers, held, strict=True):
            for name, value in attributes.items():
                setattr(layer, name, _copied(value))

    return restore


def _copied(value: Any) -> Any:
    """Lists of arrays as other objects: a write in place changes the object that it is made in."""
    if isinstance(value, list):
        return [one.astype(one.dtype) if isinstance(one, mx.array) else one for one in value]
    return value


def measured(
    build: Callable[[], Sequence[mx.array]], restore: Callable[[], None], count: int
) -> Cost:
    """The median time of ``build``, and the graph that it makes."""
    spent = []
    graph = GpuGraph()
    with graph.active():
        arrays = build()
        calls = Counter(graph.calls)
        del arrays
        restore()
        gc.collect()
        gc.disable()
        for _ in range(count):
            begin = time.thread_time()
            arrays = build()
            spent.append(1e6 * (time.thread_time() - begin))
            if len(spent) == count:
                kinds = kinds_of_graph(arrays)
            del arrays
            restore()
        gc.enable()
    launches = launches_of(kinds, calls)
    return Cost(
        round(statistics.median(spent), 1),
        kinds.total(),
        launches.total(),
        dict(launches.most_common()),
    )


def prompts_of(model: Any, plan: KvPlan, rows: int, tokens: int, capacity: int) -> PrefillRows:
    """Rows after their first chunk of so many tokens, computed."""
    group = PrefillRows(plan.backend, plan.kinds, capacity, tokens)
    group.begin(Chunk(0, tokens))
    model(mx.ones((rows, tokens), mx.int32), cache=plan.tree.nested(group.layers))
    group.end()
    mx.eval(group.arrays)
    return group


def decode_cost(model: Any, plan: KvPlan, count: int, *, shares: bool, replays: bool) -> Cost:
    """A step of ``ROWS`` rows of unequal length, after a shared prefix or not.

    ``replays``: by a graph that was traced before.
    """
    slots = replace(plan, replays=replays).slots(ROWS)
    group = prompts_of(model, plan, 1, PREFIX + OWN, PREFIX + OWN)
    prefix = None
    if shares:
        pieces: dict[int, Pieces] = {
            place: layer.block(0, 0, PREFIX) or () for place, layer in enumerate(group.layers)
        }
        prefix = slots.make_prefix(b"prefix", PREFIX, pieces)
    for index in range(ROWS):
        length = PREFIX + OWN - index % 8
        pieces_of_row = group.row(0, length, PREFIX if shares else 0)
        slots.admit(Demand(length, 64, PREFIX if shares else 0), pieces_of_row, prefix)
    tokens = mx.ones((ROWS, 1), mx.int32)
    mx.eval(tokens)
    slots.make_room(None)
    mx.eval(slots.arrays)

    def build() -> list[mx.array]:
        slots.begin_step()
        logits = slots.forward(model, tokens)
        slots.end_step()
        return [logits, *slots.arrays]

    if slots.graphs is not None:  # else the columns end too soon for a trace
        step_graphs.LEAST_LEFT = 0
    restore_layers, layouts = _kept(slots.layers), slots.layouts
    writes = {window: layout.write for window, layout in layouts.all.items()}

    def restore() -> None:
        restore_layers()
        for window, write in writes.items():
            layouts.all[window].write = write

    return measured(build, restore, count)


def chunk_cost(model: Any, plan: KvPlan, count: int) -> Cost:
    """The second of three chunks of ``PROMPTS`` prompts."""
    return chunk_of(model, plan, prompts_of(model, plan, PROMPTS, CHUNK, 3 * CHUNK), CHUNK, count)


def first_cost(model: Any, plan: KvPlan, count: int) -> Cost:
    """The only chunk of ``PROMPTS`` prompts."""
    return chunk_of(model, plan, PrefillRows(plan.backend, plan.kinds, CHUNK, CHUNK), 0, count)


def behind_cost(model: Any, plan: KvPlan, count: int) -> Cost:
    """The only chunk of ``PROMPTS`` prompts after a prefix that they share."""
    before = prompts_of(model, plan, 1, PREFIX, PREFIX)
    group = PrefillRows(plan.backend, plan.kinds, PREFIX + CHUNK, CHUNK)
    for layer, other in zip(group.layers, before.layers, strict=True):
        assert isinstance(layer, AttentionPrefill) and isinstance(other, AttentionPrefill)
        layer.share([layer._scheme.split(other.block(0, 0, PREFIX))], PREFIX)
    return chunk_of(model, plan, group, PREFIX, count)


def chunk_of(model: Any, plan: KvPlan, group: PrefillRows, start: int, count: int) -> Cost:
    """A chunk whose logits are wanted if it is the only one."""
    is_only = group.capacity == start + CHUNK
    tokens = mx.ones((PROMPTS, CHUNK), mx.int32)
    mx.eval(tokens)

    def build() -> list[mx.array]:
        group.begin(Chunk(start, CHUNK))
        logits = model(tokens, cache=plan.tree.nested(group.layers))
        group.end()
        return [*([logits] if is_only else []), *group.arrays]

    return measured(build, _kept(group.layers), count)


def insert_cost(model: Any, plan: KvPlan, count: int) -> Cost:
    """``PROMPTS`` computed prompts of unequal length come into slots between those of others."""
    slots = plan.slots(ROWS)
    group = prompts_of(model, plan, PROMPTS, CHUNK, CHUNK)
    for _ in range(ROWS):
        slots.admit(Demand(CHUNK, 64), group.row(0, CHUNK))
    for index in range(PROMPTS):
        slots.release(2 * index)
    lengths = [CHUNK - index for index in range(PROMPTS)]
    rows = [
        Arrival(slots.place(Demand(length, 64))[0], index, length)
        for index, length in enumerate(lengths)
    ]
    mx.eval(slots.arrays)

    def build() -> list[mx.array]:
        slots.fill_group(Arrivals(rows), group.layers)
        return slots.arrays

    return measured(build, _kept(slots.layers), count)


def gaps_cost(model: Any, plan: KvPlan, count: int) -> Cost:
    """Every second row has left, and the highest 16 of the others close the gaps."""
    slots = plan.slots(ROWS_WITH_GAPS)
    group = prompts_of(model, plan, 1, CHUNK, CHUNK)
    for _ in range(ROWS_WITH_GAPS):
        slots.admit(Demand(CHUNK, 64), group.row(0, CHUNK))
    for slot in range(0, ROWS_WITH_GAPS, 2):
        slots.release(slot)
    mx.eval(slots.arrays)
    restore_layers, layouts = _kept(slots.layers), slots.layouts
    starts = {window: (dict(one._starts), dict(one._ends)) for window, one in layouts.all.items()}
    waits: list[int] = []

    def build() -> list[mx.array]:
        real, mx.eval = mx.eval, lambda *_: waits.append(1)
        try:
            slots.close_gaps()
        finally:
            mx.eval = real
        return slots.arrays

    def restore() -> None:
        restore_layers()
        for window, (first, last) in starts.items():
            layouts.all[window]._starts, layouts.all[window]._ends = dict(first), dict(last)

    cost = measured(build, restore, count)
    cost.kinds["waits"] = len(waits) // (count + 1)
    return cost


def show(part: str, found: dict[str, Cost]) -> None:
    kinds = sorted({kind for cost in found.values() for kind in cost.kinds})
    print(f"\n{part}\n{'scheme':22}{'microseconds':>14}{'primitives':>12}{'launches':>10}")
    for scheme, cost in found.items():
        print(f"{scheme:22}{cost.microseconds:>14,.0f}{cost.primitives:>12,}{cost.launches:>10,}")
    for kind in kinds:
        counts = "".join(f"{cost.kinds.get(kind, 0):>10,}" for cost in found.values())
        print(f"  {kind:26}{counts}")


ONCE = {
    "first": first_cost,
    "behind": behind_cost,
    "chunk": chunk_cost,
    "insert": insert_cost,
    "gaps": gaps_cost,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--scheme", action="append", help="may be repeated")
    parser.add_argument("--apart", action="store_true", help="no kernel packs chunks")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.repeats = 15
    return args


def plan_of(model: Any, scheme: str, path: AttentionPath, *, chunks: bool) -> KvPlan:
    """The plan for a model, whose checks are those of a model of two layers.

    Layers are alike, and on a CPU all 36 take minutes in bfloat16.
    """
    fixed = Fixed(path, 2048, 768, chunks=chunks)
    backend = HostBackend(measurements=Checks())

    def plan_for(one: Any) -> KvPlan:
        what = "bench", one, discover("bench", one), scheme, mx.bfloat16, backend
        return make_plan(*what, slots=ROWS, fixed=fixed)

    plan_for(build_model(CHECKED_LAYERS)).undo()
    return plan_for(model)


def main() -> None:
    args = arguments()
    model = build_model(LAYERS)
    parts = (args.only,) if args.only else PARTS
    found: dict[str, dict[str, Cost]] = {part: {} for part in parts}
    for scheme in args.scheme or SCHEMES:
        name, _, kernel = scheme.partition(" ")
        path: AttentionPath = "kernel" if kernel else "fused"
        plan = plan_of(model, name, path, chunks=not args.apart)
        for part in parts:
            if part in ONCE:
                found[part][scheme] = ONCE[part](model, plan, args.repeats)
                continue
            for name, replays in ((scheme, False), (f"{scheme} again", True)):
                found[part][name] = decode_cost(
                    model, plan, args.repeats, shares=part == "shared", replays=replays
                )
        plan.undo()
    for part, costs in found.items():
        show(part, costs)
    if args.json:
        document = {
            part: {scheme: asdict(cost) for scheme, cost in costs.items()}
            for part, costs in found.items()
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
