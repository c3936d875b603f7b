"""Measures the recall models: `PYTHONPATH=worker:producer:tests python -m recall.evaluate`.

Greedy answers in float32 through mlx-lm's own caches to prompts that training did not see, `BATCH`
prompts of one length at a time; then the same with wrong caches (`faults.py`). Prints two tables.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from batchkv_worker.kv.backends import blas

blas.load()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from recall.faults import (  # noqa: E402
    FAULTS,
    STATE_FAULTS,
    WINDOW_FAULTS,
    Fault,
)
from recall.shapes import CONFIGS, MARKED  # noqa: E402
from recall.task import Case, Kind, draw_cases  # noqa: E402

HERE = Path(__file__).parent
BATCH = 20
KINDS: tuple[Kind, ...] = ("recall", "echo")


def load(name: str, folder: Path = HERE) -> Any:
    """The model `name` in float32."""
    model, _ = load_model(folder / name)
    model.set_dtype(mx.float32)
    return model


def caches_of(model: Any, bits: int | None = None) -> list[Any]:
    """Empty caches; with `bits`, layers of full attention are quantized from the first token on."""
    caches: list[Any] = make_prompt_cache(model)
    if bits is None:
        return caches
    return [QuantizedKVCache(64, bits) if type(c) is KVCache else c for c in caches]


def answers(
    model: Any, cases: list[Case], bits: int | None = None, fault: Fault | None = None
) -> list[list[int]]:
    """The greedy answers to prompts of one length; `fault` strikes before the first decode step."""
    caches = caches_of(model, bits)
    inputs = mx.array([case.prompt for case in cases])
    steps: list[Any] = []
    for _ in cases[0].answer:
        steps.append(mx.argmax(model(inputs, cache=caches)[:, -1], axis=-1))
        mx.eval(steps[-1])
        if fault is not None and len(steps) == 1:
            fault(caches, cases)
        inputs = steps[-1][:, None]
    rows: list[list[int]] = mx.stack(steps, axis=1).tolist()
    return rows


def groups(name: str, count: int, kind: Kind, seed: int) -> Iterator[list[Case]]:
    """`count` cases in groups of one prompt length, lengths spread over 100 to 400."""
    num_groups = math.ceil(count / BATCH)
    for group in range(num_groups):
        length = 100 + 300 * group // max(1, num_groups - 1)
        size = min(BATCH, count - group * BATCH)
        body = range(length, length + 1)
        yield list(draw_cases(size, seed + group, kind, body, name in MARKED))


def share_right(
    name: str,
    model: Any,
    count: int,
    kind: Kind,
    bits: int | None = None,
    fault: Fault | None = None,
) -> str:
    """How many answers are right in all their tokens, for a table."""
    right = 0
    for cases in groups(name, count, kind, seed=1000 if fault else 0):
        found = answers(model, cases, bits, fault)
        right += sum(case.is_right(tokens) for case, tokens in zip(cases, found, strict=True))
    return f"{right}/{count} ({right / count:.1%})"


def _print_row(*columns: object) -> None:
    sys.stdout.write("| " + " | ".join(str(column) for column in columns) + " |\n")
    sys.stdout.flush()


def print_accuracies(models: dict[str, Any], count: int) -> None:
    """A row for each model and precision of the cache; a third of the prompts when quantized."""
    _print_row("model", "cache", *KINDS)
    _print_row(*["---"] * 4)
    for name, model in models.items():
        for label, bits in (("float32", None), ("8 bits", 8), ("4 bits", 4)):
            size = count if bits is None else count // 3
            _print_row(name, label, *(share_right(name, model, size, kind, bits) for kind in KINDS))


def print_faults(models: dict[str, Any], count: int) -> None:
    """A row for each model and fault."""
    _print_row("model", "fault", *KINDS)
    _print_row(*["---"] * 4)
    special = {"hybrid": STATE_FAULTS, "sliding": WINDOW_FAULTS}
    for name, model in models.items():
        for label, fault in {**FAULTS, **special.get(name, {})}.items():
            shares = (share_right(name, model, count, kind, fault=fault) for kind in KINDS)
            _print_row(name, label, *shares)


@click.command()
@click.option("--models", "folder", type=click.Path(path_type=Path), default=HERE, help="Folder.")
@click.option("--name", "names", multiple=True, default=list(CONFIGS), help="Only these models.")
@click.option("--prompts", default=300, show_default=True, help="Prompts of each kind.")
@click.option("--fault-prompts", default=60, show_default=True, help="The same for each fault.")
def main(folder: Path, names: tuple[str, ...], prompts: int, fault_prompts: int) -> None:
    """Print accuracies, and what wrong caches do to them."""
    models = {name: load(name, folder) for name in names}
    print_accuracies(models, prompts)
    sys.stdout.write("\n")
    print_faults(models, fault_prompts)


if __name__ == "__main__":
    main()
