"""The task of the recall models: prompts of token ids whose answers can be checked.

A prompt is BOS, facts among filler tokens, and a question. A fact is three tokens in a row,
`node payload next-node`, and all facts of a prompt form one ring. There are two questions:

- `RECALL node` asks for the walk from that node: payload, next node, its payload, and so on. Few
  payloads serve many nodes, so what follows a payload depends on the node before it.
- `ECHO` asks for the token `ECHO_DISTANCE` places back, and so on for every token of the answer.

The first needs every fact of the walk in the cache, and its order; the second needs positions.
The hybrid model's prompts hold marks too, and the last one has a say in every payload of an answer
(`marked_payloads`).

Seeds give the same cases on every machine. No MLX here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

PAD, BOS, RECALL, ECHO = range(4)
FILLERS = range(4, 12)
MARKS = range(12, 16)
PAYLOADS = range(16, 32)
NODES = range(32, 128)
VOCABULARY = 128

ECHO_DISTANCE = 32
MIN_BODY = 40
"""Tokens before a question at least: an echo must have something to repeat."""
MAX_FACTS, MAX_BODY, MAX_HOPS = 64, 416, 8
"""What the models were trained for: facts, tokens before the question, nodes of a walk."""

Kind = Literal["recall", "echo"]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the greedy answer that a right cache gives."""

    prompt: list[int]
    answer: list[int]
    kind: Kind

    @property
    def sources(self) -> list[int]:
        """For each token of the answer the place in the prompt from which it is had."""
        size, count = len(self.prompt), len(self.answer)
        if self.kind == "echo":
            return [size - ECHO_DISTANCE + step for step in range(count)]
        pairs = zip(self.prompt, self.prompt[1:], strict=False)
        facts = {a: place for place, (a, b) in enumerate(pairs) if a in NODES and b in PAYLOADS}
        nodes = [self.prompt[-1], *self.answer[1:-1:2]]
        return [facts[node] + shift for node in nodes for shift in (1, 2)]

    def is_right(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens`, as many as the answer or more, begin with it."""
        return list(tokens[: len(self.answer)]) == self.answer


@dataclass(frozen=True, slots=True)
class Rows:
    """Right-padded rows, each with the same number of questions and their answers.

    tokens: [rows, length]
    slots: [rows, questions] the place of each question's first token
    is_echo: [rows, questions]
    """

    tokens: Ints
    slots: Ints
    is_echo: npt.NDArray[np.bool_]


def slot_length(num_hops: int) -> int:
    """Tokens of a question with its answer, alike for both kinds."""
    return 2 + 2 * num_hops


def _draw_below(rng: np.random.Generator, shape: tuple[int, ...], limit: Ints | int) -> Ints:
    """Integers from 0 to below `limit`, from nothing but uniform floats."""
    return (rng.random(shape) * limit).astype(np.int64)


def marked_payloads(payloads: Ints, marks: Ints) -> Ints:
    """Payloads as an answer writes them behind these last marks; the first mark changes nothing."""
    return PAYLOADS.start + ((payloads - PAYLOADS.start) ^ (marks - MARKS.start))


def _set_marks(rng: np.random.Generator, tokens: Ints, ends: Ints) -> Ints:
    """Turn up to one filler in eight before `ends` into a mark; returns the last ones, [rows, 1].

    Some rows get many and some few, so that the last may be far back. The second token is a mark in
    any case, unless a fact stands there: then it is as if the first mark did.
    """
    places = np.arange(tokens.shape[1])
    density = 0.125 * rng.random((len(tokens), 1)) ** 2
    chosen = (rng.random(tokens.shape) < density) | (places == 1)
    chosen &= (tokens >= FILLERS.start) & (tokens < FILLERS.stop) & (places < ends[:, None])
    marks = MARKS.start + _draw_below(rng, tokens.shape, len(MARKS))
    tokens[chosen] = marks[chosen]
    last = np.where(chosen, places, -1).argmax(axis=1)[:, None]
    found = np.take_along_axis(tokens, last, axis=1)
    return np.where(found >= MARKS.start, found, MARKS.start)


def _lay_out(rng: np.random.Generator, num_facts: int, fillers: Ints) -> tuple[Ints, Ints]:
    """Places of the facts, [rows, facts], and lengths of the bodies; BOS is at 0."""
    items = rng.random((len(fillers), num_facts + int(fillers.max()))).argsort(axis=1)
    widths = np.where(items < num_facts, 3, items - num_facts < fillers[:, None])
    starts = 1 + widths.cumsum(axis=1) - widths
    places = np.take_along_axis(starts, items.argsort(axis=1)[:, :num_facts], axis=1)
    return places, 1 + widths.sum(axis=1)


def draw_rows(
    rng: np.random.Generator,
    fillers: Ints,
    num_facts: int,
    num_hops: int,
    is_echo: npt.NDArray[np.bool_],
    length: int,
    has_marks: bool = False,
) -> Rows:
    """Rows with `fillers[row]` filler tokens each, and the questions that `is_echo` names."""
    num_rows, num_questions = is_echo.shape
    tokens = FILLERS.start + _draw_below(rng, (num_rows, length), len(FILLERS))
    places, bodies = _lay_out(rng, num_facts, fillers)
    nodes = NODES.start + rng.random((num_rows, len(NODES))).argsort(axis=1)[:, :num_facts]
    payloads = PAYLOADS.start + _draw_below(rng, nodes.shape, len(PAYLOADS))
    tokens[:, 0] = BOS
    for shift, part in enumerate((nodes, payloads, np.roll(nodes, -1, axis=1))):
        np.put_along_axis(tokens, places + shift, part, axis=1)
    written = payloads
    if has_marks:
        written = marked_payloads(payloads, _set_marks(rng, tokens, bodies))
    slots = bodies[:, None] + slot_length(num_hops) * np.arange(num_questions)
    starts = _draw_below(rng, is_echo.shape, num_facts)
    for question in range(num_questions):
        place, echoes = slots[:, question], is_echo[:, question]
        walk = (starts[:, question, None] + np.arange(num_hops + 1)) % num_facts
        pairs = [np.take_along_axis(part, walk, axis=1) for part in (nodes, written)]
        steps = np.stack(pairs, axis=-1).reshape(num_rows, -1)[:, :-1]
        for step in range(slot_length(num_hops)):
            back = tokens[np.arange(num_rows), place + step - ECHO_DISTANCE]
            token = np.where(echoes, back if step else ECHO, steps[:, step - 1] if step else RECALL)
            tokens[np.arange(num_rows), place + step] = token
    ends = slots[:, -1] + slot_length(num_hops)
    tokens[np.arange(length) >= ends[:, None]] = PAD
    return Rows(tokens, slots, is_echo)


def draw_case(
    seed: int,
    num_facts: int = 32,
    num_body: int = 200,
    kind: Kind = "recall",
    num_hops: int = MAX_HOPS,
    has_marks: bool = False,
) -> Case:
    """One case with `num_body` tokens before the question; its answer has `2 * num_hops` tokens."""
    num_fillers = num_body - 1 - 3 * num_facts
    if num_fillers < 0 or num_body < MIN_BODY:
        raise ValueError(f"{num_facts} facts do not fit into {num_body} tokens")
    rng = np.random.default_rng([0x7E57, seed])
    is_echo = np.array([[kind == "echo"]])
    length = num_body + slot_length(num_hops)
    rows = draw_rows(rng, np.array([num_fillers]), num_facts, num_hops, is_echo, length, has_marks)
    tokens = [int(token) for token in rows.tokens[0]]
    start = num_body + (1 if kind == "echo" else 2)
    return Case(tokens[:start], tokens[start : start + 2 * num_hops], kind)


def draw_cases(
    count: int,
    seed: int = 0,
    kind: Kind | None = None,
    body: range = range(100, 401),
    has_marks: bool = False,
) -> Iterator[Case]:
    """Ragged cases with 8 to 64 facts; without a `kind` every fourth is an echo."""
    rng = np.random.default_rng([0xCA5E, seed])
    for number in range(count):
        num_body = body.start + int(rng.random() * len(body))
        most = min(MAX_FACTS, (num_body - 1) // 3)
        num_facts = 8 + int(rng.random() * (most - 7))
        chosen = kind or ("echo" if number % 4 == 3 else "recall")
        case_seed = seed * 1_000_003 + number
        yield draw_case(case_seed, num_facts, num_body, chosen, has_marks=has_marks)
