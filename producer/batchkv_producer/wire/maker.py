"""What decides a worker's answers: the model's files, the KV scheme and the dtype's class.

A batch stores these as fields of its hash: the submit writes what it knows, the first ``pull``
writes the rest. A worker with other values passes the batch's rows by. None of it is part of the
batch's id.

A row may require what workers of older versions cannot do (``needs_of``). Such workers pass it by,
too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass

from batchkv_producer.wire.job import Request

# What a row may need beyond what every worker of the first version can do, and which rows do.
_NEEDS: tuple[tuple[str, Callable[[Request], bool]], ...] = (
    ("style", lambda request: request.style != "raw"),  # a plain prompt for the chat template
)
ABILITIES = tuple(name for name, _ in _NEEDS)

SHOWN_DIGITS = 4  # of a fingerprint, to people
_MARK_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Maker:
    """Fingerprint of the model's files, KV scheme, and "float32" or "half"; "" is not known."""

    fingerprint: str = ""
    scheme: str = ""
    dtype: str = ""

    def values(self) -> tuple[str, str, str]:
        """The three, in the order in which scripts take them."""
        fingerprint, scheme, dtype = astuple(self)
        return fingerprint, scheme, dtype

    def fields(self) -> dict[str, str]:
        """What is known of it, as the fields of a batch are called."""
        return {name: value for name, value in asdict(self).items() if value}

    def mark(self) -> str:
        """What the lines of an output file say of it; "" when the weights are not known."""
        return f"fp_{self.fingerprint[:_MARK_DIGITS]}_{self.scheme}" if self.fingerprint else ""

    def may_have_made(self, mark: str) -> bool:
        """Whether a line with this mark can be of this maker, by what is known of both."""
        parts = mark.split("_", 2)
        if not self.fingerprint or len(parts) != 3 or parts[0] != "fp":
            return True
        return parts[1] == self.fingerprint[:_MARK_DIGITS] and self.scheme in ("", parts[2])

    def words(self) -> str:
        """``weights 3f2a, affine8, half``, as far as it is known."""
        weights = f"weights {self.fingerprint[:SHOWN_DIGITS]}" if self.fingerprint else ""
        return ", ".join(word for word in (weights, self.scheme, self.dtype) if word)


NOBODY = Maker()
ANYBODY = Maker("*", "*", "*")  # compares nothing, and writes nothing


def needs_of(request: Request) -> tuple[str, ...]:
    """What a worker must be able to do for this row, beyond what every version can."""
    return tuple(name for name, is_needed in _NEEDS if is_needed(request))
