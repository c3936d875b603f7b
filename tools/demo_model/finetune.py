"""The second stage: `PYTHONPATH=tools python -m demo_model.finetune --start DIR --out DIR`.

It begins with the weights of the first stage (`train`), whose recall it keeps, and adds the skills
of `skills`. It needs no GPU: a step takes about a second on one core.
"""

import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.kv.backends import blas
from demo_model.skills import Part, draw_skills
from demo_model.tokenizer import (
    ASSISTANT,
    CALL,
    END,
    END_CALL,
    END_THINK,
    MARKERS,
    THINK,
    build_tokenizer,
    save_tokenizer,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Chats of one length. ``share``: of all steps."""

    num_tokens: int
    batch_size: int
    max_facts: int
    share: float


SHAPES = (
    Shape(num_tokens=288, batch_size=7, max_facts=9, share=0.60),
    Shape(num_tokens=512, batch_size=4, max_facts=24, share=0.15),
    Shape(num_tokens=1280, batch_size=2, max_facts=96, share=0.25),
)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Right-padded chats with the places of what is learned.

    tokens: [batch, num_tokens]
    places: [learned] index into the flattened tokens, of the token before each learned one
    answers: [learned] number of the answer that a learned token belongs to
    skills: the skill of each answer
    """

    tokens: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    answers: npt.NDArray[np.int32]
    skills: tuple[str, ...]


def encode_chat(tokenizer: Tokenizer, parts: Sequence[Part], num_tokens: int) -> list[Any]:
    """The parts that fit, each as its tokens and its skill. A part begins at a token's border."""
    found, num = list[Any](), 0
    for part in parts:
        ids = tokenizer.encode(part.text, add_special_tokens=False).ids
        if num + len(ids) > num_tokens:
            break
        num += len(ids)
        found.append((ids, part.skill))
    return found


def draw_lesson(tokenizer: Tokenizer, shape: Shape, seed: str) -> Lesson:
    """The batch of a seed."""
    rng = random.Random(seed)
    tokens = np.zeros((shape.batch_size, shape.num_tokens), dtype=np.int32)
    places, answers, skills = list[int](), list[int](), list[str]()
    for row in range(shape.batch_size):
        column = 0
        for ids, skill in encode_chat(
            tokenizer, draw_skills(rng, shape.max_facts), shape.num_tokens
        ):
            tokens[row, column : column + len(ids)] = ids
            if skill:
                first = row * shape.num_tokens + column - 1
                places += range(first, first + len(ids))
                answers += [len(skills)] * len(ids)
                skills.append(skill)
            column += len(ids)
    return Lesson(tokens, np.array(places, np.int32), np.array(answers, np.int32), tuple(skills))


class Scores:
    """The loss and the share of right answers of each skill, over the last ones."""

    def __init__(self) -> None:
        self._right: dict[str, float] = defaultdict(float)

    def record(self, lesson: Lesson, right: npt.NDArray[np.bool_]) -> None:
        """``right``: [learned] whether each token is the most likely one."""
        wrong = set(lesson.answers[~right].tolist())
        for number, skill in enumerate(lesson.skills):
            self._right[skill] += 0.02 * ((number not in wrong) - self._right[skill])

    def report(self) -> dict[str, float]:
        return {skill: round(right, 3) for skill, right in sorted(self._right.items())}


def start_model(start: Path, tokenizer: Tokenizer, *, resume: bool) -> Any:
    """The weights of a model in float32. Its markers begin anew, unless it knows them already."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(start)
    model.set_dtype(mx.float32)
    if resume:
        return model
    weight = np.array(model.model.embed_tokens.weight)
    rng = np.random.default_rng(0)
    like = {THINK: ASSISTANT, END_THINK: ASSISTANT, CALL: ASSISTANT, END_CALL: END}
    for marker in MARKERS:
        noise = rng.normal(0, weight.std(), weight.shape[1]).astype(np.float32)
        of_old = weight[tokenizer.token_to_id(like[marker])]
        weight[tokenizer.token_to_id(marker)] = 0.5 * of_old + noise
    model.model.embed_tokens.weight = mx.array(weight)
    return model


def lesson_loss(model: Any, lesson: Lesson, levels: float | None) -> Any:
    """Mean cross entropy of the learned tokens, and which of them are most likely."""
    import mlx.core as mx
    import mlx.nn as nn

    from demo_model.train import RoundingCache

    tokens, places = mx.array(lesson.tokens), mx.array(lesson.places)
    cache = [RoundingCache(levels) for _ in model.layers] if levels else None
    hidden = model.model(tokens, cache=cache)
    hidden = hidden.reshape(-1, hidden.shape[-1])[places]
    logits = model.model.embed_tokens.as_linear(hidden)
    targets = tokens.reshape(-1)[places + 1]
    losses = nn.losses.cross_entropy(logits, targets)
    return losses.mean(), logits.argmax(axis=-1) == targets


def finetune(
    model: Any, tokenizer: Tokenizer, out: Path, *, num_steps: int, rate: float, seed: int
) -> None:
    """Train; the rate rises for 50 steps, then falls as a cosine."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

    from demo_model.train import COARSEST_LEVELS, save_model

    optimizer: Any = optim.AdamW(rate, betas=[0.9, 0.98], weight_decay=0.01)
    optimizer.init(model.trainable_parameters())
    run = nn.value_and_grad(model, lesson_loss)
    scores, start = Scores(), time.monotonic()
    for step in range(1, num_steps + 1):
        falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        optimizer.learning_rate = rate * min(1.0, step / 50) * falling
        name = f"skills {seed} {step}"
        shape = random.Random(name).choices(SHAPES, [one.share for one in SHAPES])[0]
        lesson = draw_lesson(tokenizer, shape, name)
        levels = COARSEST_LEVELS if step % 3 == 2 else None
        (loss, right), grads = run(model, lesson, levels)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(loss, right, model.state, optimizer.state)
        scores.record(lesson, np.array(right))
        if step % 25 == 0:
            seconds = round(time.monotonic() - start)
            facts = {"step": step, "seconds": seconds, "loss": round(loss.item(), 4)}
            sys.stdout.write(json.dumps({**facts, **scores.report()}) + "\n")
            sys.stdout.flush()
        if step % 50 == 0:
            save_model(model, out)
    save_model(model, out)


@click.command()
@click.option("--start", type=click.Path(path_type=Path), default=MODEL_PATH, help="Directory.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Model directory.")
@click.option("--steps", default=1200, show_default=True, help="Training steps.")
@click.option("--rate", default=5e-4, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True, help="Seed of the chats.")
@click.option("--resume", is_flag=True, help="START has been through this stage: go on with it.")
def main(start: Path, out: Path, steps: int, rate: float, seed: int, *, resume: bool) -> None:
    """Add the skills to the model in START and write it to OUT."""
    blas.load()
    tokenizer = build_tokenizer()
    save_tokenizer(tokenizer, out)
    model = start_model(start, tokenizer, resume=resume)
    finetune(model, tokenizer, out, num_steps=steps, rate=rate, seed=seed)


if __name__ == "__main__":
    main()
