"""Trains a recall model:

    PYTHONPATH=worker:producer:tests:tools python -m recall.train NAME --out DIR

NAME is full, hybrid or sliding. As with the demo model, recall is learned from few facts first,
and the next level comes when nine of ten tokens are right. At the last level every other step
rounds keys and values as a 4-bit cache would, the others as an 8-bit cache would.
"""

from __future__ import annotations

import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gemma3_text, granitemoehybrid, qwen3

from demo_model.curriculum import PROMOTE_AT, Plan
from demo_model.train import COARSEST_LEVELS, FINEST_LEVELS, RoundingCache
from recall.shapes import CONFIGS, MARKED
from recall.task import MAX_BODY, MAX_FACTS, MAX_HOPS, MIN_BODY, Rows, draw_rows, slot_length

_MODULES = {"qwen3": qwen3, "granitemoehybrid": granitemoehybrid, "gemma3_text": gemma3_text}
_ECHO_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the curriculum; every batch of a level has the same shape."""

    max_facts: int
    max_body: int
    num_hops: int
    num_questions: int
    batch_size: int

    @property
    def length(self) -> int:
        return self.max_body + self.num_questions * slot_length(self.num_hops)


CURRICULUM = (
    Level(4, 56, 2, 6, 512),
    Level(8, 80, 4, 4, 384),
    Level(16, 128, MAX_HOPS, 3, 256),
    Level(32, 256, MAX_HOPS, 3, 192),
    Level(MAX_FACTS, MAX_BODY, MAX_HOPS, 3, 128),
)


class ShiftConv(nn.Conv1d):  # type: ignore[misc]
    """A depthwise convolution as sums of shifted products, which every backend can train."""

    def __call__(self, x: Any) -> Any:
        """x: [batch, tokens + kernel - 1, channels]."""
        size = self.weight.shape[1]
        length = x.shape[1] - size + 1
        parts = (x[:, i : i + length] * self.weight[:, i, 0] for i in range(size))
        return sum(parts, start=self.bias)


def build(name: str, seed: int) -> Any:
    """The model to be trained, with float32 weights."""
    mx.random.seed(seed)
    config = CONFIGS[name]
    module: Any = _MODULES[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(config))
    if name == "sliding":
        model.sanitize({})  # without a head in the weights, the embeddings are the head
    for layer in model.layers:
        if "mamba" in layer:
            _prepare_mixer(layer.mamba)
    mx.eval(model.parameters())
    return model


def _prepare_mixer(mixer: Any) -> None:
    """Time steps from 0.01 to 0.5, so that some states last, and a convolution to train."""
    steps = mx.exp(mx.linspace(math.log(0.01), math.log(0.5), mixer.num_heads))
    mixer.dt_bias = steps + mx.log(-mx.expm1(-steps))
    channels = mixer.conv_dim
    conv = ShiftConv(channels, channels, mixer.conv_kernel_size, groups=channels)
    conv.update(mixer.conv1d.parameters())
    mixer.conv1d = conv


def save(name: str, model: Any, out: Path) -> None:
    """Write the weights in bfloat16 and the config."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {key: w.astype(mx.bfloat16) for key, w in tree_flatten(model.parameters())}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    text = json.dumps(CONFIGS[name], indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def draw_batch(rng: np.random.Generator, level: Level, has_marks: bool) -> Rows:
    """Mostly close to the level's most facts and longest prompts, but not always."""
    low = level.max_facts // 2 if rng.random() < 0.7 else 4
    num_facts = int(rng.integers(low, level.max_facts + 1))
    least = max(0, MIN_BODY - 1 - 3 * num_facts)
    most = level.max_body - 1 - 3 * num_facts
    fillers = rng.integers(least, most + 1, level.batch_size)
    is_echo = rng.random((level.batch_size, level.num_questions)) < _ECHO_SHARE
    num_hops = level.num_hops
    return draw_rows(rng, fillers, num_facts, num_hops, is_echo, level.length, has_marks)


class BatchSource(threading.Thread):
    """Batches a few ahead; a change of level takes effect behind those."""

    def __init__(self, seed: int, has_marks: bool, level_of: Callable[[], Level]) -> None:
        super().__init__(daemon=True)
        self._has_marks = has_marks
        self._rng = np.random.default_rng([0x7124, seed])
        self._level_of = level_of
        self.batches: queue.Queue[tuple[Level, Rows]] = queue.Queue(8)

    def run(self) -> None:
        while True:
            level = self._level_of()
            self.batches.put((level, draw_batch(self._rng, level, self._has_marks)))


class Course:
    """Which level is being learned, and how well."""

    def __init__(self, levels: tuple[Level, ...]) -> None:
        self._levels = levels
        self._index = 0
        self.score = 0.0

    @property
    def level(self) -> Level:
        return self._levels[self._index]

    @property
    def is_last(self) -> bool:
        return self._index == len(self._levels) - 1

    def record(self, level: Level, right: float) -> None:
        """Take the share of right tokens of one batch in."""
        if level is not self.level:
            return
        self.score = 0.9 * self.score + 0.1 * right
        if self.score >= PROMOTE_AT and not self.is_last:
            self._index, self.score = self._index + 1, 0.0


def answer_loss(
    model: Any, tokens: Any, slots: Any, is_echo: Any, levels: Any, num_hops: int
) -> tuple[Any, Any]:
    """Mean cross entropy of the answers' tokens; shares of right tokens, of recall and of echo.

    Logits are computed at the answers only: [batch, questions * answer, vocabulary].
    """
    in_slot = mx.arange(slot_length(num_hops) - 1)
    places = (slots[:, :, None] + in_slot).reshape(len(tokens), -1)
    # The node after RECALL is the asker's choice.
    recalled = (~is_echo[:, :, None] & (in_slot > 0)).reshape(places.shape)
    echoed = (is_echo[:, :, None] & (in_slot >= 0)).reshape(places.shape)
    targets = mx.take_along_axis(tokens, places + 1, axis=1)
    caches = [None if "mamba" in layer else RoundingCache(levels) for layer in model.layers]
    hidden = model.model(tokens, cache=caches)
    hidden = mx.take_along_axis(hidden, places[:, :, None], axis=1)
    logits = model.model.embed_tokens.as_linear(hidden).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, targets)
    asked = recalled | echoed
    right = logits.argmax(axis=-1) == targets
    shares = [(right & kind).sum() / mx.maximum(kind.sum(), 1) for kind in (recalled, echoed)]
    return (losses * asked).sum() / asked.sum(), mx.stack(shares)


def make_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """A compiled training step: float32 weights, bfloat16 arithmetic, clipped gradients."""

    def loss_of(weights: Any, *batch: Any) -> Any:
        model.update(tree_map(lambda w: w.astype(mx.bfloat16), weights))
        return answer_loss(model, *batch)

    def step(*batch: Any) -> Any:
        weights = model.trainable_parameters()
        (loss, shares), grads = mx.value_and_grad(loss_of)(weights, *batch)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        model.update(optimizer.apply_gradients(grads, weights))
        return loss, shares

    state = [model.state, optimizer.state]
    compiled: Callable[..., Any] = mx.compile(step, inputs=state, outputs=state)
    return compiled


def _report(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def train(
    name: str, model: Any, plan: Plan, source: BatchSource, course: Course, out: Path
) -> None:
    """Train until the plan is used up; the weights are saved as they go and at the end."""
    optimizer: Any = optim.AdamW(plan.peak_rate, betas=[0.9, 0.98], weight_decay=0.01)
    optimizer.init(model.trainable_parameters())
    run_step = make_step(model, optimizer)
    start = time.monotonic()
    step = 0
    while (progress := plan.progress(step, time.monotonic() - start)) < 1.0:
        level, rows = source.batches.get()
        optimizer.learning_rate = plan.learning_rate(step, progress)
        levels = COARSEST_LEVELS if course.is_last and step % 2 else FINEST_LEVELS
        arrays = (mx.array(rows.tokens), mx.array(rows.slots), mx.array(rows.is_echo))
        loss, shares = run_step(*arrays, mx.array(levels), level.num_hops)
        mx.eval(loss, shares, model.state, optimizer.state)
        recall, echo = shares.tolist()
        course.record(level, recall)
        if step % 50 == 0:
            _report(
                name=name,
                step=step,
                seconds=round(time.monotonic() - start, 1),
                facts=level.max_facts,
                loss=round(loss.item(), 4),
                recall=round(recall, 4),
                echo=round(echo, 4),
            )
        step += 1
        if step % 500 == 0:
            save(name, model, out)
    save(name, model, out)


@click.command()
@click.argument("name", type=click.Choice(list(CONFIGS)))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Model directory.")
@click.option("--steps", default=20_000, show_default=True, help="Training steps at most.")
@click.option("--minutes", default=60.0, show_default=True, help="Training time at most.")
@click.option("--rate", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True, help="Seed of data and weights.")
@click.option("--batch-divisor", default=1, show_default=True, help="Shrinks batches, for trials.")
def main(
    name: str, out: Path, steps: int, minutes: float, rate: float, seed: int, batch_divisor: int
) -> None:
    """Train the model NAME and write it to OUT."""
    model = build(name, seed)
    levels = tuple(replace(x, batch_size=x.batch_size // batch_divisor) for x in CURRICULUM)
    course = Course(levels)
    source = BatchSource(seed, name in MARKED, lambda: course.level)
    source.start()
    train(name, model, Plan(steps, minutes * 60, rate, warmup_steps=100), source, course, out)


if __name__ == "__main__":
    main()
