"""The sources of the kernels: bodies in the words that every dialect defines (``source/``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "source"


@dataclass(frozen=True, slots=True)
class Body:
    """One kernel: a source, the names of its arrays, and the numbers that it is read with.

    ``helpers`` are the sources of its functions. ``flags`` are defined before the source is read.
    Bodies differ by name, because MLX knows kernels by their names alone.
    """

    name: str
    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    flags: tuple[tuple[str, int], ...] = ()

    @property
    def functions(self) -> str:
        """The functions that the source calls."""
        return "".join(map(source_text, ("common", *self.helpers)))

    def source(self, start: str = "") -> str:
        """The inner part of a function; ``start`` defines a thread's position in the grid."""
        flags = "".join(f"#define {name} {value}\n" for name, value in self.flags)
        return flags + (source_text(start) if start else "") + source_text(self.file)


@cache
def source_text(name: str) -> str:
    """A file of ``source/`` without comments and indents, because MLX formats it at each call."""
    lines = (_FOLDER / f"{name}.h").read_text(encoding="utf-8").splitlines()
    stripped = (line.split("//")[0].strip() for line in lines)
    return "".join(f"{line}\n" for line in stripped if line)


SPLITS = Body("batchkv_splits", "splits", ("queries", "records", "bounds", "scale"), ("splits",))
# The same with products of matrices, for dialects that have them.
MATRIX_SPLITS = Body(
    "batchkv_matrix_splits", "matrix_splits", SPLITS.inputs, SPLITS.outputs, ("pairs",)
)
PACK = Body("batchkv_pack", "pack", ("keys", "values"), ("records",), ("packing",))


@cache
def merge_body(*, prefixes: bool, sinks: bool, alone: bool) -> Body:
    """Joins splits. ``alone``: also returns log-sum-exps, as ``PartialAttention`` has them."""
    flags = ("PREFIXES", prefixes), ("SINKS", sinks), ("ALONE", alone)
    letters = "".join(name[0].lower() for name, is_on in flags if is_on)
    return Body(
        f"batchkv_merge{'_' + letters if letters else ''}",
        "merge",
        (
            *("splits", "bounds"),
            *(("scores", "values", "chain") if prefixes else ()),
            *(("sinks",) if sinks else ()),
        ),
        ("out", "score") if alone else ("out",),
        flags=tuple((name, int(is_on)) for name, is_on in flags),
    )


@cache
def unpack_body(key_parts: int, value_parts: int) -> Body:
    """Parts of records, for schemes with so many parts."""
    names = [("key", key_parts), ("value", value_parts)]
    return Body(
        f"batchkv_unpack_{key_parts}{value_parts}",
        "unpack",
        ("records",),
        tuple(f"{name}{number}" for name, count in names for number in range(count)),
        ("unpacking",),
        tuple((f"{name.upper()}_PARTS", count) for name, count in names),
    )
