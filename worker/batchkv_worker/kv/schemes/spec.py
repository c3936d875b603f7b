"""KV schemes as text, for a whole model::

    SPEC    = PAIR {"," LAYERS "=" PAIR}
    PAIR    = NAME                              for keys and values alike
            | NAME "+" NAME                     keys + values
            | "k" BITS "v" BITS ["/" GROUP]     affine keys and affine values
    NAME    = base name of ``SCHEMES`` ["r"] ["/" GROUP]    r: rotated; a group of GROUP at most
    LAYERS  = SOME {"+" SOME}
    SOME    = "first" | "last" | NUMBER | NUMBER "-" NUMBER

``affine4``, ``k8v4/32``, ``affine8+nvfp4``, ``turbo3,first+last=affine8``,
``affine4r,0-3=k8v4,7=float``. Layers are attention layers, counted from 0; a layer that several
overrides name has the last of them. Blanks and case do not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchkv_worker.kv.schemes.names import SCHEMES, TensorNames

__all__ = ["SCHEMES", "Layers", "SchemeSpec"]

_LAYERS = "first, last, a number, a range as 0-3, or several joined by +"


@dataclass(frozen=True, slots=True)
class Layers:
    """Attention layers by number: inclusive ranges, in which -1 means the last layer."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Layers:
        """``first+last``, ``0-3+7``; ValueError, one sentence, for anything else."""
        return cls(tuple(_range(some, text) for some in text.split("+")))

    def numbers(self, num_layers: int) -> set[int]:
        """The numbers of these layers; ValueError if the model does not have one of them."""
        if not num_layers:
            raise ValueError("KV scheme names attention layers, and this model has none")
        named: set[int] = set()
        for low, high in self.ranges:
            if high >= num_layers:
                raise ValueError(
                    f"KV scheme names attention layer {high}; this model's are 0 to "
                    f"{num_layers - 1}"
                )
            named.update({num_layers - 1} if low < 0 else range(low, high + 1))
        return named

    def __str__(self) -> str:
        return "+".join(map(_range_text, self.ranges))


def _range(text: str, whole: str) -> tuple[int, int]:
    if text in ("first", "last"):
        return (0, 0) if text == "first" else (-1, -1)
    found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    if not found:
        raise ValueError(f"KV scheme has unknown layers {whole!r}; known: {_LAYERS}")
    low, high = int(found[1]), int(found[2] or found[1])
    if low > high:
        raise ValueError(f"KV scheme's layers {text!r} end before they begin")
    return low, high


def _range_text(bounds: tuple[int, int]) -> str:
    low, high = bounds
    if low <= 0 and high <= 0:
        return "first" if low == 0 else "last"
    return str(low) if low == high else f"{low}-{high}"


@dataclass(frozen=True, slots=True)
class SchemeSpec:
    """The schemes of all attention layers of a model: a base, and overrides for some layers."""

    base: TensorNames
    overrides: tuple[tuple[Layers, TensorNames], ...] = ()

    @classmethod
    def parse(cls, text: str) -> SchemeSpec:
        """Read the text that this module's docstring describes.

        Raises ValueError with one sentence that names the fault and the known values.
        """
        base, *overrides = re.sub(r"\s", "", text).lower().split(",")
        if not base:
            raise ValueError(f"KV scheme {text!r} names no scheme; known: {', '.join(SCHEMES)}")
        if "=" in base:
            raise ValueError(
                f"KV scheme {text!r} begins with layers; a scheme for all layers comes first, as "
                "in affine4,last=float"
            )
        return cls(TensorNames.parse(base), tuple(_override(item) for item in overrides))

    def names(self, num_layers: int) -> list[TensorNames]:
        """The names for each attention layer of a model that has so many, first to last.

        Raises ValueError if an override names a layer that the model does not have.
        """
        names = [self.base] * num_layers
        for layers, override in self.overrides:
            for number in layers.numbers(num_layers):
                names[number] = override
        return names

    def __str__(self) -> str:
        """The canonical text: it parses to an equal spec, and equal specs have equal texts."""
        overrides = (f",{layers}={names}" for layers, names in self.overrides)
        return str(self.base) + "".join(overrides)


def _override(item: str) -> tuple[Layers, TensorNames]:
    layers, equals, names = item.partition("=")
    if not equals:
        raise ValueError(f"KV scheme override {item!r} is not LAYERS=SCHEME; layers are {_LAYERS}")
    return Layers.parse(layers), TensorNames.parse(names)
