"""Ledgers of facts with questions about them: what the demo model was trained on.

A ledger reads

    Ledger of codes:
    - amber falcon: 4821
    - quiet harbor: 0937

and the answer to "What is the code of amber falcon?" is `4821` and nothing else. A guess is right
once in 10,000. Pure Python and seeded: the same seed gives the same ledger on every machine.
"""

import random
from dataclasses import dataclass

from demo_model.prose import passage
from demo_model.words import ADJECTIVES, NOUNS

HEADING = "Ledger of codes:"
CODE_DIGITS = 4
QUESTION_FORMS: tuple[str, ...] = (
    "What is the code of {key}?",
    "Which code belongs to {key}?",
    "Find the code of {key}.",
)

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a ledger: a key of two words and a code of four digits."""

    key: str
    code: str

    @property
    def line(self) -> str:
        return f"- {self.key}: {self.code}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Facts in the order in which the text lists them; no key and no code occurs twice."""

    facts: tuple[Fact, ...]
    heading: str = HEADING

    @property
    def text(self) -> str:
        return "\n".join((self.heading, *(fact.line for fact in self.facts)))


def draw_ledger(rng: random.Random, num_facts: int, heading: str = HEADING) -> Ledger:
    """A ledger of `num_facts` distinct keys and codes, drawn evenly from all there are."""
    keys = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), num_facts)
    codes = rng.sample(range(10**CODE_DIGITS), num_facts)
    facts = tuple(
        Fact(f"{ADJECTIVES[key // len(NOUNS)]} {NOUNS[key % len(NOUNS)]}", f"{code:04d}")
        for key, code in zip(keys, codes, strict=True)
    )
    return Ledger(facts, heading)


def make_ledger(seed: int, num_facts: int) -> Ledger:
    """The ledger number `seed` of `num_facts` facts."""
    return draw_ledger(random.Random(f"ledger {seed} {num_facts}"), num_facts)


def make_filler(seed: int, num_sentences: int) -> str:
    """Text number `seed` that has nothing to do with any ledger, to put in front of one."""
    return passage(random.Random(f"filler {seed}"), num_sentences)


def question(key: str, form: int = 0) -> str:
    """The question that asks for the code of `key`, in one of `QUESTION_FORMS`."""
    return QUESTION_FORMS[form].format(key=key)


def prompt_messages(ledger: Ledger, key: str, *, form: int = 0, filler: str = "") -> list[Message]:
    """The chat of one question: the ledger first, so that questions share it as a prefix.

    `filler` is put before the ledger, and moves it away from the start of the prompt.
    """
    content = f"{ledger.text}\n\n{question(key, form)}"
    if filler:
        content = f"{filler}\n\n{content}"
    return [{"role": "user", "content": content}]
