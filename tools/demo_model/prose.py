"""Made-up English: the text around a ledger, and the corpus of the tokenizer.

The sentences need no sense. They put everyday words, small numbers and names in an ordinary
order, as a school problem would.
"""

import random
import re
from collections.abc import Callable

from demo_model.words import ADJECTIVES, COMMON, LESS_COMMON, NAMES, NOUNS

_TEMPLATES: tuple[str, ...] = (
    "{name} has {n} {common} and gives {n} of them to {name}.",
    "How many {common} does {name} have left?",
    "The {adj} {noun} was near the {adj} {noun} for {n} days.",
    "{name} buys {n} {noun}s for ${n} each, and pays ${n} in total.",
    "There are {n} people in the {rare}, and {n} of them {common} every day.",
    "If {name} works {n} hours a week, how much will she earn in {n} weeks?",
    "A {rare} costs {n}% more than a {rare}.",
    "First, {name} went to the {rare}; then {name} came back to the {noun}.",
    "We saw a {adj} {rare} and a {adj} {rare} by the {noun}.",
    "Let x = {n} and y = {n}, so x + y = {n}.",
    "In {n}, the {rare} of the {noun} was {n} feet long.",
    "{name} said that the {common} {rare} is {adj}, but nobody knows why.",
    "The answer is {n}.",
    'The {rare} reads: "{common} {common} {rare}".',
    "It takes {n}/{n} of an hour to {common} the {rare}, so {n} * {n} = {n} minutes.",
    "- {rare}: {common} {common}",
    "Each of the {n} {noun}s is {adj} or {adj}, and none of them has a {rare}.",
    "No. {n} of the {adj} {noun} is kept in the {rare} until {n}.",
)
_SLOT = re.compile(r"\{(\w+)\}")


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 4)))


_FILL: dict[str, Callable[[random.Random], str]] = {
    "name": lambda rng: rng.choice(NAMES),
    "n": _number,
    "adj": lambda rng: rng.choice(ADJECTIVES),
    "noun": lambda rng: rng.choice(NOUNS),
    "common": lambda rng: rng.choice(COMMON),
    "rare": lambda rng: rng.choice(LESS_COMMON),
}


def sentence(rng: random.Random) -> str:
    """One made-up sentence of roughly 8 to 20 words."""
    return _SLOT.sub(lambda slot: _FILL[slot[1]](rng), rng.choice(_TEMPLATES))


def passage(rng: random.Random, num_sentences: int) -> str:
    """`num_sentences` sentences in paragraphs of a few, empty for none."""
    parts: list[str] = []
    for index in range(num_sentences):
        if index:
            parts.append(rng.choice((" ", " ", " ", "\n", "\n\n")))
        parts.append(sentence(rng))
    return "".join(parts)
