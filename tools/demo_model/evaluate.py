"""Measures the demo model: `PYTHONPATH=tools python -m demo_model.evaluate`.

Greedy answers in float32 to one question a ledger, each ledger new, with the KV cache in float and
quantized. The cache is quantized from the first token on, so the prompt reads rounded keys too.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.kv.backends import blas
from demo_model.ledger import (
    CODE_DIGITS,
    QUESTION_FORMS,
    Message,
    make_filler,
    make_ledger,
    prompt_messages,
)
from demo_model.skill_cases import SKILLS, SkillCase, draw_skill_cases

MAX_SKILL_TOKENS = 80
SCHEMES: dict[str, int | None] = {"float": None, "8 bits": 8, "4 bits": 4}


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: ledgers of this size behind that much other text."""

    num_facts: int
    num_sentences: int


CELLS = (
    *(Cell(num_facts, 0) for num_facts in (4, 8, 16, 32, 64, 96)),
    Cell(16, 10),
    Cell(64, 10),
    Cell(16, 40),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the answer it must get."""

    messages: list[Message]
    code: str


def draw_cases(cell: Cell, num_cases: int, seed: int = 0) -> Iterator[Case]:
    """`num_cases` questions, each about a ledger of its own."""
    rng = random.Random(f"cases {cell} {seed}")
    for _ in range(num_cases):
        ledger = make_ledger(rng.getrandbits(64), cell.num_facts)
        fact = rng.choice(ledger.facts)
        form = rng.randrange(len(QUESTION_FORMS))
        filler = make_filler(rng.getrandbits(64), cell.num_sentences)
        yield Case(prompt_messages(ledger, fact.key, form=form, filler=filler), fact.code)


class Answerer:
    """The model in float32 with its tokenizer."""

    def __init__(self, path: Path) -> None:
        blas.load()
        import mlx.core as mx
        from mlx_lm import load

        self.model: Any
        self._tokenizer: Any
        self.model, self._tokenizer = load(str(path))
        self.model.set_dtype(mx.float32)

    def _cache(self, bits: int | None) -> list[Any]:
        from mlx_lm.models.cache import KVCache, QuantizedKVCache

        if bits is None:
            return [KVCache() for _ in self.model.layers]
        return [QuantizedKVCache(group_size=64, bits=bits) for _ in self.model.layers]

    def prompt_ids(self, messages: list[Message], **options: Any) -> list[int]:
        """The prompt as token ids, up to where the answer starts. ``options``: the template's."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, **options
        )
        return ids

    def answer(self, messages: list[Message], bits: int | None = None) -> str:
        """The greedy answer, two tokens longer than a code at most."""
        return self._generated(self.prompt_ids(messages), CODE_DIGITS + 2, bits)

    def answer_skill(self, case: SkillCase, bits: int | None = None) -> str:
        """The greedy answer to a question about a skill, with its thought and its calls."""
        ids = self.prompt_ids(case.messages, **case.options)
        return self._generated(ids, MAX_SKILL_TOKENS, bits)

    def _generated(self, ids: list[int], max_tokens: int, bits: int | None) -> str:
        from mlx_lm import generate

        text: str = generate(
            self.model,
            self._tokenizer,
            ids,
            max_tokens=max_tokens,
            prompt_cache=self._cache(bits),
        )
        return text


def _row(answerer: Answerer, cell: Cell, num_cases: int) -> str:
    cases = list(draw_cases(cell, num_cases))
    num_tokens = sum(len(answerer.prompt_ids(case.messages)) for case in cases) // len(cases)
    columns = [str(cell.num_facts), str(cell.num_sentences), str(num_tokens)]
    for bits in SCHEMES.values():
        num_right = sum(answerer.answer(case.messages, bits) == case.code for case in cases)
        columns.append(f"{num_right}/{num_cases} ({num_right / num_cases:.1%})")
    return "| " + " | ".join(columns) + " |\n"


def _skill_row(answerer: Answerer, skill: str, num_cases: int) -> str:
    columns = [skill]
    for bits in SCHEMES.values():
        cases = draw_skill_cases(skill, num_cases)
        num_right = sum(answerer.answer_skill(case, bits) == case.answer for case in cases)
        columns.append(f"{num_right}/{num_cases} ({num_right / num_cases:.1%})")
    return "| " + " | ".join(columns) + " |\n"


def _head(names: tuple[str, ...]) -> str:
    return "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|\n"


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=MODEL_PATH, help="Directory.")
@click.option("--questions", default=100, show_default=True, help="Questions in each row.")
def main(model: Path, questions: int) -> None:
    """Print two tables of accuracies: of ledgers of each size, and of the other skills."""
    answerer = Answerer(model)
    sys.stdout.write(_head(("skill", *SCHEMES)))
    for skill in SKILLS:
        sys.stdout.write(_skill_row(answerer, skill, questions))
        sys.stdout.flush()
    sys.stdout.write("\n" + _head(("facts", "sentences before", "prompt tokens", *SCHEMES)))
    for cell in CELLS:
        sys.stdout.write(_row(answerer, cell, questions))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
