"""The sources of the kernels: bodies in the words that every dialect defines (``source/``)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "source"


@dataclass(frozen=True, slots=True)
class Body:
    """One kernel: its sources, the names of its arrays, and the numbers that it is read with.

    ``files`` are the parts of the inner part of a function, ``helpers`` those of the functions that
    it calls. ``flags`` are defined before they are read. Bodies differ by name, because MLX knows
    kernels by their names alone.
    """

    name: str
    files: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    flags: tuple[tuple[str, int], ...] = ()

    @property
    def functions(self) -> str:
        """The functions that the source calls."""
        return "".join(map(source_text, self._function_files))

    @property
    def included_functions(self) -> str:
        """``functions`` as files that the compiler reads."""
        return "".join(map(included, self._function_files))

    @property
    def _function_files(self) -> tuple[str, ...]:
        return "common", *self.helpers

    def source(self, start: str = "") -> str:
        """The inner part of a function; ``start`` defines a thread's position in the grid."""
        return self._flags_text + "".join(
            map(source_text, (*([start] if start else []), *self.files))
        )

    def included_source(self, start: str) -> str:
        """``source`` as files that the compiler reads.

        It names the shapes and strides that they use: MLX gives a kernel those that it finds.
        """
        text = self.source(start)
        whats = (f"{name}_{what}" for name in self.inputs for what in ("shape", "strides"))
        used = " ".join(what for what in whats if what in text)
        return f"// {used}\n{self._flags_text}" + "".join(map(included, (start, *self.files)))

    @property
    def _flags_text(self) -> str:
        return "".join(f"#define {name} {value}\n" for name, value in self.flags)


@cache
def source_text(name: str) -> str:
    """A file of ``source/`` without comments and indents, because MLX copies it at each call."""
    lines = (_FOLDER / f"{name}.h").read_text(encoding="utf-8").splitlines()
    stripped = (" ".join(line.split("//")[0].split()) for line in lines)
    return "".join(f"{line}\n" for line in stripped if line)


@cache
def sources_digest() -> str:
    """What tells the kernels of versions apart: the sources without comments, and this folder.

    The folder's modules say how threads divide the work, and what is compiled.
    """
    names = sorted(file.stem for file in _FOLDER.glob("*.h"))
    modules = sorted(_FOLDER.parent.glob("*.py"))
    parts = [*map(source_text, names), *(file.read_text("utf-8") for file in modules)]
    text = "\0".join([*names, *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def included(name: str) -> str:
    """The line with which a compiler reads a file of ``source/``."""
    return f'#include "{_FOLDER / name}.h"\n'


PACK = Body("batchkv_pack", ("pack",), ("keys", "values"), ("records",), ("wide", "packing"))

_PARTS = ("codes", "scales", "biases")  # of affine keys or values
_KEY_PARTS, _VALUE_PARTS = (tuple(f"{name}_{part}" for part in _PARTS) for name in ("key", "value"))


@cache
def chunk_body(*, dense: bool, behind: bool) -> Body:
    """Parts of a chunk's affine keys and values. ``dense``: also the numbers that they give back.

    ``behind``: those of a shared prefix before them.
    """
    flags = ("DENSE", dense), ("BEHIND", behind)
    parts = *_KEY_PARTS, *_VALUE_PARTS
    return Body(
        _named("batchkv_chunk", flags),
        ("chunk",),
        ("keys", "values", *(f"old_{part}" for part in parts if behind)),
        (*parts, *(("dense_keys", "dense_values") if dense else ())),
        ("wide", "packing", "giving"),
        _numbers(flags),
    )


@cache
def splits_body(
    *,
    matrices: bool,
    joined: bool = False,
    last: bool = False,
    prefixes: bool = False,
    sinks: bool = False,
) -> Body:
    """Attention to splits. ``matrices``: with products of matrices, for dialects that have them.

    ``joined``: no row has more than one split, so the result is also joined with the rest.
    ``last``: the last threadgroup of a row and KV head does so for all of their splits.
    """
    whole = ("PREFIXES", prefixes), ("SINKS", sinks), ("ALONE", False)
    flags = ("JOINED", joined), ("LAST", last), *whole
    files = ["matrix_splits" if matrices else "splits", "finish"]
    files += [name for name, is_in in (("last", last), ("join", joined or last)) if is_in]
    return Body(
        _named(f"batchkv_{'matrix_' if matrices else ''}splits", flags),
        tuple(files),
        (
            *("queries", "records", "bounds"),
            *(["counters"] if last else []),
            *_joined_inputs(prefixes, sinks),
        ),
        ("out",) if joined else ("out", "splits") if last else ("splits",),
        ("pairs",) if matrices else (),
        _numbers(flags),
    )


@cache
def merge_body(*, prefixes: bool, sinks: bool, alone: bool) -> Body:
    """Joins splits. ``alone``: also returns log-sum-exps, as ``PartialAttention`` has them."""
    flags = ("PREFIXES", prefixes), ("SINKS", sinks), ("ALONE", alone)
    return Body(
        _named("batchkv_merge", flags),
        ("merge", "join"),
        ("splits", "bounds", *_joined_inputs(prefixes, sinks)),
        ("out", "score") if alone else ("out",),
        flags=_numbers(flags),
    )


@cache
def place_rows_body(key_parts: int, value_parts: int) -> Body:
    """Records of whole slots for rows that come in, for schemes with so many parts."""
    names = [("key", key_parts), ("value", value_parts)]
    return Body(
        f"batchkv_place_rows_{key_parts}{value_parts}",
        ("place_rows",),
        ("places", *(f"{name}{number}" for name, count in names for number in range(count))),
        ("records",),
        ("joining",),
        tuple((f"{name.upper()}_PARTS", count) for name, count in names),
    )


Flags = tuple[tuple[str, bool], ...]


def _named(name: str, flags: Flags) -> str:
    letters = "".join(flag[0].lower() for flag, is_on in flags if is_on)
    return f"{name}_{letters}" if letters else name


def _numbers(flags: Flags) -> tuple[tuple[str, int], ...]:
    return tuple((flag, int(is_on)) for flag, is_on in flags)


def _joined_inputs(prefixes: bool, sinks: bool) -> tuple[str, ...]:
    return (*(("scores", "values", "chain") if prefixes else ()), *(("sinks",) if sinks else ()))
