"""Attention over packed keys and values, and the choice of the likeliest tokens, of one model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchkv_producer.doctor.contract import Verdict, fail, ok
from batchkv_worker.doctor.arithmetic import Compared
from batchkv_worker.doctor.device import REPORT, judge_compared

if TYPE_CHECKING:
    from batchkv_worker.engine.engine import Engine
    from batchkv_worker.kv.schemes.packing import LayerScheme
    from batchkv_worker.kv.start.pathcheck import PathCheck

SCHEMES = ("float", "affine8", "affine4", "k8v4", "mxfp8", "turbo4", "turbo3")
COUNTS = (1, 20, 64)
MAX_SHOWN = 2


def scheme_verdict(engine: Engine, name: str) -> Verdict | None:
    """Every path of every layer of a scheme, at five lengths, against float32."""
    from batchkv_worker.kv.start.pathcheck import check_paths

    plan, dtype = engine.plan, engine.loaded.dtype
    checks: list[PathCheck] = []
    for layer in layers_of(engine, name):
        checks += check_paths(plan.backend, layer, _query_heads(engine, layer), dtype)
    return judge_paths(checks)


def prefix_verdict(engine: Engine) -> Verdict | None:
    """Rows behind a shared prefix, as the engine's own layers compute them."""
    from batchkv_worker.kv.attention.paths import LayerAttention, in_slots
    from batchkv_worker.kv.layers.kinds import AttentionKind
    from batchkv_worker.kv.start.pathcheck import check_prefix

    if not engine.plan.shares:
        return None
    checks: list[PathCheck] = []
    kinds = [kind for kind in engine.plan.kinds if isinstance(kind, AttentionKind)]
    for kind in dict.fromkeys(kind for kind in kinds if kind.window is None):
        if kind.path is not None:
            scheme = in_slots(kind.scheme, kind.path)
            layer = LayerAttention(
                *(kind.backend, scheme, kind.dtype, kind.path), records=kind.records
            )
            checks += check_prefix(layer, _query_heads(engine, kind.scheme))
    return judge_paths(checks)


def layers_of(engine: Engine, name: str) -> Iterator[LayerScheme]:
    """What the layers of this model keep under a scheme, each once. None where it does not fit."""
    from batchkv_worker.kv.schemes.packing import fit_model
    from batchkv_worker.kv.schemes.spec import SchemeSpec

    try:
        fitted = fit_model(SchemeSpec.parse(name), engine.plan.tree.shapes)
    except ValueError:
        return
    yield from dict.fromkeys(fitted)


def _query_heads(engine: Engine, layer: LayerScheme) -> int:
    """Query heads of a layer: the model's, if they are a multiple of the layer's own."""
    from batchkv_worker.kv.attention.paths import num_query_heads

    own = layer.shape.num_heads
    heads = num_query_heads(engine.loaded.model, engine.plan.tree.shapes[0].num_heads)
    return heads if heads % own == 0 else own


def judge_paths(checks: Sequence[PathCheck]) -> Verdict | None:
    """A path that the device refuses is left out by every engine. One that differs is a fault."""
    if not checks:
        return None
    from batchkv_worker.kv.start.pathcheck import STORED

    wrong = [check for check in checks if not check.is_ok and not check.fault]
    refused = sorted({check.name for check in checks if check.fault})
    names = sorted({check.name for check in checks} - {STORED} - set(refused))
    if wrong:
        shown = "; ".join(map(str, wrong[:MAX_SHOWN]))
        more = f"; and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        return fail(f"{shown}{more}", f"workers do not use it; {REPORT}")
    left_out = f"; {', '.join(refused)} is not on this device" if refused else ""
    if not names:
        return fail(f"no path is on this device{left_out}", "use another KV scheme")
    good = [check for check in checks if not check.fault]
    off = max(check.error for check in good if check.name != STORED)
    lost = max((check.error for check in good if check.name == STORED), default=0.0)
    lengths = len({check.columns for check in good if check.name != STORED})
    packing = f"; packing changes keys and values by {lost:.1%}" if lost else ""
    return ok(
        f"within {off:.1g} of float32 at {lengths} lengths: {', '.join(names)}{packing}{left_out}"
    )


def best_tokens_verdict(engine: Engine) -> Verdict:
    """The likeliest few of this model's vocabulary, with many equal numbers among them."""
    return judge_compared(compare_largest(engine.loaded.vocabulary))


def compare_largest(vocabulary: int) -> list[Compared]:
    """Of equal numbers the first is the larger, as in a stable sort."""
    import mlx.core as mx

    from batchkv_worker.engine.tokens.largest import largest

    rng = random.Random(17)
    rows = [[rng.randint(-200, 200) / 8 for _ in range(vocabulary)] for _ in range(2)]
    array = mx.array(rows)
    found = []
    for count in (count for count in COUNTS if count <= vocabulary):
        places, values = largest(array, count)
        for row, own, picked in zip(rows, places.tolist(), values.tolist(), strict=True):
            order = sorted(range(vocabulary), key=lambda place: -row[place])[:count]
            wrong = sum(a != b for a, b in zip(own, order, strict=True)) / count
            right = [row[place] for place in order]
            wrong = max(wrong, sum(a != b for a, b in zip(picked, right, strict=True)) / count)
            found.append(Compared(f"best {count} of {vocabulary:,}", wrong, 0.0))
    return found
