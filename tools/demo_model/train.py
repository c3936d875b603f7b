"""Trains the demo model: `PYTHONPATH=tools python -m demo_model.train --out DIR`.

Recall from a long list does not start to be learned from long lists. So the ledgers begin with
four facts and grow when nine of ten answers are right (`CURRICULUM`); at the last level the
learning rate falls and keys and values are rounded to a few bits, as a quantized cache would.
"""

import collections
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3

from demo_model.batches import ANSWER_TOKENS, Batch, Level, draw_batch
from demo_model.curriculum import CURRICULUM, Curriculum, Plan
from demo_model.tokenizer import (
    END,
    MAX_LENGTH,
    PAD,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    build_tokenizer,
    save_tokenizer,
)

FINEST_LEVELS, COARSEST_LEVELS = 255.0, 15.0
"""Steps of the rounding of keys and values: of 8 bits, and of 4."""


class RoundingCache:
    """Replaces a layer's KV cache in training, and rounds keys and values in groups of 64.

    The error of an affine quantization with `levels` steps, with gradients that pass unchanged.
    """

    offset = 0

    def __init__(self, levels: Any) -> None:
        self._levels = levels

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """keys, values: [batch, kv_heads, tokens, 64], returned rounded."""
        return self._round(keys), self._round(values)

    def _round(self, x: Any) -> Any:
        exact = mx.stop_gradient(x.astype(mx.float32))
        low = exact.min(axis=-1, keepdims=True)
        step = (exact.max(axis=-1, keepdims=True) - low) / self._levels + 1e-8
        error = mx.round((exact - low) / step) * step + low - exact
        return x + error.astype(x.dtype)


def model_config() -> dict[str, Any]:
    """`config.json`: qwen3 with heads of 64, two of them for keys and values."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "eos_token_id": SPECIAL_TOKENS.index(END),
    }


def save_model(model: Any, directory: Path) -> None:
    """Write the weights in bfloat16, with the two configs, beside the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model_config()
    weights = {name: w.astype(mx.bfloat16) for name, w in tree_flatten(model.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    generation = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    generation["do_sample"] = False
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def answer_loss(model: Any, tokens: Any, answers: Any, asked: Any, levels: Any) -> tuple[Any, Any]:
    """Mean cross entropy of the answers' tokens, and the share of answers that are all right.

    Runs in bfloat16, and computes logits at the answers only: [batch, questions * 5, vocab].
    """
    batch, num_questions = answers.shape
    places = answers[:, :, None] + mx.arange(ANSWER_TOKENS)[None, None]
    places = places.reshape(batch, num_questions * ANSWER_TOKENS)
    targets = mx.take_along_axis(tokens, places + 1, axis=1)
    hidden = model.model(tokens, cache=[RoundingCache(levels) for _ in model.layers])
    hidden = mx.take_along_axis(hidden, places[:, :, None], axis=1)
    logits = model.model.embed_tokens.as_linear(hidden).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, targets).reshape(batch, num_questions, ANSWER_TOKENS)
    right = (logits.argmax(axis=-1) == targets).reshape(losses.shape).all(axis=-1)
    total = asked.sum()
    return (losses.mean(axis=-1) * asked).sum() / total, (right * asked).sum() / total


def make_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """A compiled training step: float32 weights, bfloat16 arithmetic, clipped gradients."""

    def loss_of(weights: Any, *batch: Any) -> Any:
        model.update(tree_map(lambda w: w.astype(mx.bfloat16), weights))
        return answer_loss(model, *batch)

    def step(tokens: Any, answers: Any, asked: Any, levels: Any) -> Any:
        weights = model.trainable_parameters()
        (loss, right), grads = mx.value_and_grad(loss_of)(weights, tokens, answers, asked, levels)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        model.update(optimizer.apply_gradients(grads, weights))
        return loss, right

    state = [model.state, optimizer.state]
    compiled: Callable[..., Any] = mx.compile(step, inputs=state, outputs=state)
    return compiled


class BatchSource:
    """Batches from other processes, a few ahead. A new level takes effect after those."""

    def __init__(self, tokenizer_path: Path, seed: int, num_processes: int) -> None:
        self._pool = multiprocessing.Pool(num_processes)
        self._tokenizer_path = str(tokenizer_path)
        self._seed = seed
        self._ahead = 2 * num_processes
        self._next = 0
        self._pending: collections.deque[tuple[Level, Any]] = collections.deque()

    def batches(self, level_of: Callable[[], Level]) -> Iterator[tuple[Level, Batch]]:
        """Endless batches. `level_of` is called for the level of each when it is ordered."""
        while True:
            while len(self._pending) < self._ahead:
                level = level_of()
                task = (self._tokenizer_path, level, f"train {self._seed} {self._next}")
                self._pending.append((level, self._pool.apply_async(draw_batch, task)))
                self._next += 1
            level, result = self._pending.popleft()
            yield level, result.get()

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


def _report(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def train(model: Any, plan: Plan, source: BatchSource, course: Curriculum, out: Path) -> None:
    """Train until a limit of the plan is reached. Weights are saved meanwhile and at the end."""
    optimizer: Any = optim.AdamW(plan.peak_rate, betas=[0.9, 0.98], weight_decay=0.01)
    optimizer.init(model.trainable_parameters())
    run_step = make_step(model, optimizer)
    start = time.monotonic()
    for step, (level, batch) in enumerate(source.batches(lambda: course.level)):
        seconds = time.monotonic() - start
        progress = plan.progress(step, seconds)
        if progress >= 1.0:
            break
        optimizer.learning_rate = plan.learning_rate(step, progress)
        is_coarse = course.is_last and step % 2 == 1
        levels = COARSEST_LEVELS if is_coarse else FINEST_LEVELS
        arrays = (mx.array(batch.tokens), mx.array(batch.answers), mx.array(batch.asked))
        loss, right = run_step(*arrays, mx.array(levels))
        mx.eval(loss, right, model.state, optimizer.state)
        if course.record(level, right.item()):
            _report(step=step, seconds=round(seconds, 1), next_level=asdict(course.level))
        if step % 50 == 0:
            _report(
                step=step,
                seconds=round(seconds, 1),
                facts=level.max_facts,
                loss=round(loss.item(), 4),
                right=round(right.item(), 4),
                score=round(course.score, 4),
            )
        if step % 1000 == 999:
            save_model(model, out)
    save_model(model, out)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Model directory.")
@click.option("--steps", default=8000, show_default=True, help="Training steps at most.")
@click.option("--minutes", default=60.0, show_default=True, help="Training time at most.")
@click.option("--rate", default=1e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True, help="Seed of data and weights.")
@click.option("--processes", default=8, show_default=True, help="Processes that draw batches.")
@click.option("--batch-divisor", default=1, show_default=True, help="Shrinks batches, for trials.")
def main(
    out: Path,
    steps: int,
    minutes: float,
    rate: float,
    seed: int,
    processes: int,
    batch_divisor: int,
) -> None:
    """Build the tokenizer, train the model and write both to OUT."""
    save_tokenizer(build_tokenizer(), out)
    source = BatchSource(out / "tokenizer.json", seed, processes)
    mx.random.seed(seed)
    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(model_config()))
    mx.eval(model.parameters())
    levels = tuple(
        Level(x.max_facts, x.num_tokens, max(1, x.batch_size // batch_divisor), x.max_questions)
        for x in CURRICULUM
    )
    plan = Plan(steps, minutes * 60, rate, warmup_steps=100)
    try:
        train(model, plan, source, Curriculum(levels), out)
    finally:
        source.close()


if __name__ == "__main__":
    main()
