"""The facts that decide a worker's answers: the model's files, KV scheme and the dtype's class.

A batch stores these as fields of its hash. The submit writes those that it knows, and the first
``pull`` writes the rest. A worker with other values skips the batch's rows. The batch's id does not
depend on these fields.

A row may need an ability that workers of older versions lack (``needs_of``). Such workers skip it,
too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass

from batchkv_producer.wire.job import NO_EFFORT, Request
from batchkv_producer.wire.params import newer_params

GRAMMAR = "grammar"  # the one ability that depends on what is installed: llguidance

_OTHERS = frozenset({"thinking_budget"})  # parameters with another ability


def _needs_fields(request: Request) -> bool:
    if request.prompt_tokens is not None:
        return True
    if request.params.repetition_penalty is not None:  # older versions counted other tokens
        return True
    return not newer_params(request.params).keys() <= _OTHERS


def _needs_grammar(request: Request) -> bool:
    return request.constraint is not None or request.tool_choice not in (None, "none")


def _needs_thinking(request: Request) -> bool:
    return request.params.thinking_budget is not None or request.reasoning_effort is not None


# Abilities that a row may need and that workers of older versions lack.
_NEEDS: tuple[tuple[str, Callable[[Request], bool]], ...] = (
    ("style", lambda request: request.style != "raw"),  # a plain prompt for the chat template
    ("fields", _needs_fields),  # the smaller parameters, several choices, prompts as token ids
    (GRAMMAR, _needs_grammar),  # a constraint, also that of a tool call that has to be made
    ("tools", lambda request: request.tools is not None),  # calls are parsed from the answer
    ("thinking", _needs_thinking),
    # Older versions refuse such a row, or think because of the word.
    ("no-effort", lambda request: request.reasoning_effort == NO_EFFORT),
    ("salt", lambda request: request.cache_salt is not None),  # prefixes of one owner alone
)
ABILITIES = tuple(name for name, _ in _NEEDS)

SHOWN_DIGITS = 4  # digits of a fingerprint that messages show
_MARK_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Maker:
    """Fingerprint of the model's files, KV scheme, and "float32" or "half"; "" if not known."""

    fingerprint: str = ""
    scheme: str = ""
    dtype: str = ""

    def values(self) -> tuple[str, str, str]:
        """The three, in the order in which scripts take them."""
        fingerprint, scheme, dtype = astuple(self)
        return fingerprint, scheme, dtype

    def fields(self) -> dict[str, str]:
        """The known parts, by the names of a batch's fields."""
        return {name: value for name, value in asdict(self).items() if value}

    def mark(self) -> str:
        """The ``system_fingerprint`` of output lines; "" if the weights are not known."""
        return f"fp_{self.fingerprint[:_MARK_DIGITS]}_{self.scheme}" if self.fingerprint else ""

    def may_have_made(self, mark: str) -> bool:
        """Whether this maker can have made a line with this mark. Unknown parts match."""
        parts = mark.split("_", 2)
        if not self.fingerprint or len(parts) != 3 or parts[0] != "fp":
            return True
        return parts[1] == self.fingerprint[:_MARK_DIGITS] and self.scheme in ("", parts[2])

    def words(self) -> str:
        """``weights 3f2a, affine8, half``: the known parts."""
        weights = f"weights {self.fingerprint[:SHOWN_DIGITS]}" if self.fingerprint else ""
        return ", ".join(word for word in (weights, self.scheme, self.dtype) if word)


NOBODY = Maker()
ANYBODY = Maker("*", "*", "*")  # compares nothing, and writes nothing


def needs_of(request: Request) -> tuple[str, ...]:
    """Abilities that this row needs and that some older workers lack."""
    return tuple([name for name, is_needed in _NEEDS if is_needed(request)])
