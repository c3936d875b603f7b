"""Training batches: chats about random ledgers, as token ids with the places of the answers.

No MLX here: processes beside the trainer run it, one batch a task, from a seed alone.
"""

import functools
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_model.ledger import CODE_DIGITS, HEADING, QUESTION_FORMS, Fact, draw_ledger, question
from demo_model.prose import passage
from demo_model.tokenizer import ASSISTANT, END, SYSTEM, USER

ANSWER_TOKENS = CODE_DIGITS + 1
"""A code and the end of the turn."""

_HEADINGS = (HEADING, HEADING, "Codes:", "Here are the codes to remember.", "The ledger follows.")
_TOKENS_PER_FACT = 10
_TOKENS_PER_TURN = 18
_TOKENS_PER_SENTENCE = 24

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the curriculum; every batch of a level has the same shape."""

    max_facts: int
    num_tokens: int
    batch_size: int
    max_questions: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded chats.

    tokens: [batch, num_tokens]
    answers: [batch, questions] place of the token that the first digit of an answer follows
    asked: [batch, questions] 1 where there is a question, 0 for padding
    """

    tokens: Tokens
    answers: Tokens
    asked: npt.NDArray[np.float32]


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


def _num_facts(rng: random.Random, level: Level) -> int:
    """A number of facts: mostly close to the level's maximum, sometimes small."""
    low = level.max_facts // 2 if rng.random() < 0.7 else 2
    return rng.randint(low, level.max_facts)


def _preamble(rng: random.Random, spare_tokens: int) -> tuple[str, str, str]:
    """Texts for the system turn, before the ledger and after it, within `spare_tokens`."""
    budget = max(0, spare_tokens) // _TOKENS_PER_SENTENCE
    total = 0 if rng.random() < 0.3 else rng.randint(0, budget)
    after = rng.randint(0, total) if rng.random() < 0.2 else 0
    system = rng.randint(0, total - after) if rng.random() < 0.3 else 0
    return passage(rng, system), passage(rng, total - after - system), passage(rng, after)


def _asked_facts(rng: random.Random, facts: tuple[Fact, ...], level: Level) -> list[Fact]:
    """The facts that are asked for, in order.

    Half of the chats ask at random and so repeat themselves: were no fact asked twice, the code of
    the last would be what is left over, and the model would learn to eliminate before it recalls.
    """
    if rng.random() < 0.5:
        return rng.choices(facts, k=level.max_questions)
    return rng.sample(facts, min(len(facts), level.max_questions))


def draw_chat(rng: random.Random, level: Level) -> str:
    """A chat in template form: perhaps a system turn, a ledger, then questions with answers."""
    num_facts = _num_facts(rng, level)
    ledger = draw_ledger(rng, num_facts, rng.choice(_HEADINGS))
    asked = _asked_facts(rng, ledger.facts, level)
    spare = level.num_tokens - num_facts * _TOKENS_PER_FACT - len(asked) * _TOKENS_PER_TURN
    system, before, after = _preamble(rng, spare - _TOKENS_PER_SENTENCE)
    body = "\n\n".join(text for text in (before, ledger.text, after) if text)
    if rng.random() < 0.2:
        opening = f"{SYSTEM}{system}" + ("\n\n" if system else "") + f"{body}{END}{USER}"
    else:
        opening = (f"{SYSTEM}{system}{END}" if system else "") + f"{USER}{body}\n\n"
    turns = (
        f"{question(fact.key, rng.randrange(len(QUESTION_FORMS)))}{END}{ASSISTANT}{fact.code}{END}"
        for fact in asked
    )
    return opening + USER.join(turns)


def draw_batch(tokenizer_path: str, level: Level, seed: str) -> Batch:
    """The batch of a seed. A turn that does not fit into its row is left out."""
    rng = random.Random(seed)
    tokenizer = _tokenizer(tokenizer_path)
    assistant = tokenizer.token_to_id(ASSISTANT)
    chats = [draw_chat(rng, level) for _ in range(level.batch_size)]
    tokens = np.zeros((level.batch_size, level.num_tokens), dtype=np.int32)
    answers = np.zeros((level.batch_size, level.max_questions), dtype=np.int32)
    asked = np.zeros((level.batch_size, level.max_questions), dtype=np.float32)
    for row, encoding in enumerate(tokenizer.encode_batch(chats)):
        ids = np.asarray(encoding.ids[: level.num_tokens], dtype=np.int32)
        tokens[row, : len(ids)] = ids
        places = np.flatnonzero(ids == assistant)
        places = places[places + ANSWER_TOKENS < level.num_tokens]
        answers[row, : len(places)] = places
        asked[row, : len(places)] = 1.0
    return Batch(tokens, answers, asked)
