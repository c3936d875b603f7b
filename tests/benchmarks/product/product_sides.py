"""The sides of the product's benchmark that need no queue, each in a process of its own.

    python tests/benchmarks/product/product_sides.py SIDE MODEL ROWS TRACE [BEFORE]

SIDE is ``engine`` (the engine that a worker would build from this environment, all rows at once),
``mlx`` (mlx-lm's BatchGenerator with as many slots, everything else as it comes) or ``floor``.
Starting, loading and measuring are told apart from the rows; with BEFORE the process first
computes the rows of that file, untimed. The engine's phases go into the file TRACE, as a worker's.
The last line printed is JSON. ``make MODEL SHAPE`` makes the model folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
if __name__ == "__main__" and sys.argv[1:2] in (["mlx"], ["floor"]):
    os.environ["MLX_USE_CUDA_GRAPHS"] = "1"  # as MLX launches by itself; batchkv does without them

from batchkv_worker.kv.backends import blas  # noqa: E402

blas.load()

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

from product_parts import make_model  # noqa: E402

from batchkv_producer.intake.formats import Row, read_rows  # noqa: E402
from batchkv_worker import trace  # noqa: E402
from batchkv_worker.engine.factory import build_engine  # noqa: E402
from batchkv_worker.engine.tokens.requests import prepare  # noqa: E402
from batchkv_worker.events import Completed, Work  # noqa: E402
from batchkv_worker.kv.backends.default_slots import slots_of_this_machine  # noqa: E402
from batchkv_worker.kv.start.backend import choose_backend  # noqa: E402
from batchkv_worker.model import loader as model  # noqa: E402
from batchkv_worker.settings import WorkerSettings  # noqa: E402

Figures = dict[str, Any]
Once = Callable[[list[Work]], Figures]  # what came of one file of rows


def works_of(file: Path) -> list[Work]:
    """The file's rows, as a worker gets them."""
    with file.open("rb") as stream:
        rows = [row for row in read_rows(stream, is_text=False) if isinstance(row, Row)]
    return [Work(str(row.line), row.request) for row in rows]


def engine_side(settings: WorkerSettings) -> Once:
    """Ours, with a worker's defaults."""
    engine = build_engine(settings)
    chunk: int = engine._scheduler.budget.chunk_tokens

    def once(works: list[Work]) -> Figures:
        num_tokens = num_cached = 0
        trace.ENGINE.enter(trace.PREPARE)
        for work in works:
            engine.add(work)
        while not engine.is_idle:
            trace.ENGINE.enter(trace.DECODE)
            for event in engine.step():
                assert isinstance(event, Completed), event
                num_tokens += event.usage.completion
                num_cached += event.usage.cached
        engine.prefixes.clear()
        return {"generated": num_tokens, "cached": num_cached, "chunk": chunk}

    return once


def slots_of(settings: WorkerSettings) -> int:
    """As many as the engine has, whose default depends on the device."""
    return settings.slots or slots_of_this_machine()


def mlx_side(settings: WorkerSettings) -> Once:
    """mlx-lm's, in the order of the file."""
    loaded = model.load(settings.model, settings.dtype)

    def once(works: list[Work]) -> Figures:
        rows = [prepare(work, loaded) for work in works]
        generator = BatchGenerator(loaded.model, completion_batch_size=slots_of(settings))
        generator.insert([row.prompt for row in rows], [row.generation.max_tokens for row in rows])
        left, num_tokens = len(rows), 0
        while left:
            for response in generator.next_generated():
                num_tokens += 1
                left -= response.finish_reason is not None
        generator.close()
        return {"generated": num_tokens}

    return once


def num_unique(prompts: list[list[int]]) -> int:
    """Tokens of all prompts, those of a common beginning once."""
    count, before = 0, list[int]()
    for prompt in sorted(prompts):
        same = next(
            (at for at, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b),
            min(len(before), len(prompt)),
        )
        count, before = count + len(prompt) - same, prompt
    return count


class Floor:
    """Bare forward passes of the same tokens: what no engine can do without.

    Every token of the prompts once, those of a common beginning too, in passes of as many rows of
    the mean length as a chunk holds; then as many decode steps of full batches as all answers
    need, on dense caches of the mean length, each started as soon as the one before it is built.
    Nothing is tokenized, joins, leaves, ends or is sampled but the likeliest token; each shape is
    computed once before, untimed.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._loaded = model.load(settings.model, settings.dtype)
        self._chunk = settings.prefill_chunk or choose_backend().usual_chunk
        self._slots = slots_of(settings)

    def __call__(self, works: list[Work]) -> Figures:
        rows = [prepare(work, self._loaded) for work in works]
        computed = num_unique([row.prompt for row in rows])
        generated = sum(row.generation.max_tokens for row in rows)
        mean = max(1, round(sum(len(row.prompt) for row in rows) / len(rows)))
        span = max(1, round(generated / len(rows)))
        passes = self._passes(computed, mean)
        width = min(mean, self._chunk)
        for count in {*passes}:
            mx.eval([layer.state for layer in self._prefill(count, width)])
        cache = self._filled(mean)
        self._decode(cache, mean, span, min(span, 512) + 1)
        begun = time.perf_counter()
        flying: list[Any] = []
        for count in passes:
            flying = [*flying[-1:], self._prefill(count, width)]
        mx.eval([layer.state for cached in flying for layer in cached])
        prefilled = time.perf_counter()
        self._decode(cache, mean, span, -(-generated // self._slots))
        ended = time.perf_counter()
        return {
            "generated": generated,
            "computed": computed,
            "seconds": ended - begun,
            "prefill_seconds": prefilled - begun,
            "decode_seconds": ended - prefilled,
            "chunk": self._chunk,
        }

    def _passes(self, left: int, mean: int) -> list[int]:
        """How many rows each pass has."""
        width, together = min(mean, self._chunk), max(1, self._chunk // mean)
        num_rows = -(-left // width)
        return [min(together, num_rows - done) for done in range(0, num_rows, together)]

    def _prefill(self, rows: int, length: int) -> list[Any]:
        cache: list[Any] = make_prompt_cache(self._loaded.model)
        self._loaded.model(mx.ones((rows, length), mx.int32), cache=cache)
        mx.async_eval([layer.state for layer in cache])  # no logits: they are not asked for
        return cache

    def _filled(self, length: int) -> list[Any]:
        """A dense cache of so many tokens for all slots."""
        args = self._loaded.model.args
        shape = (self._slots, args.num_key_value_heads, length, args.head_dim)
        cache: list[Any] = make_prompt_cache(self._loaded.model)
        for layer in cache:
            layer.update_and_fetch(*(mx.zeros(shape, self._loaded.dtype) for _ in range(2)))
        return cache

    def _decode(self, cache: list[Any], begin: int, span: int, steps: int) -> None:
        """Steps of full batches, whose rows begin anew after ``span`` tokens each."""
        tokens = mx.ones(self._slots, mx.int32)
        for _ in range(steps):
            if cache[0].offset >= begin + span:
                for layer in cache:
                    layer.offset = begin
            logits = self._loaded.model(tokens[:, None], cache=cache)[:, -1]
            tokens = mx.argmax(logits, axis=-1)
            mx.async_eval(tokens)
        mx.eval(tokens)


SIDES: dict[str, Callable[[WorkerSettings], Once]] = {
    "engine": engine_side,
    "mlx": mlx_side,
    "floor": Floor,
}


def main(arguments: list[str]) -> None:
    if arguments[0] == "make":
        make_model(Path(arguments[1]), arguments[2])
        return
    side, folder, file, traced, *rest = arguments
    settings = WorkerSettings.from_env(os.environ, model=folder)
    if traced != "-":
        trace.open_trace(traced, side)
    trace.ENGINE.enter(trace.START)
    once = SIDES[side](settings)
    trace.ENGINE.enter(trace.IDLE)
    ready = time.perf_counter()
    for before in rest:
        once(works_of(Path(before)))
    works = works_of(Path(file))
    mx.reset_peak_memory()
    since_1970, begun = time.time(), time.perf_counter()
    found = once(works)
    found = {"seconds": time.perf_counter() - begun, "window": [since_1970, time.time()], **found}
    trace.close_trace()
    found |= {
        "start_seconds": ready - STARTED,
        "peak_mb": mx.get_peak_memory() / 1e6,
        "slots": slots_of(settings),
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
    }
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of the engine and of MLX need no farewell


if __name__ == "__main__":
    main(sys.argv[1:])
