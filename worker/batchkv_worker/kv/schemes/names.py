"""KV schemes by name, not yet fitted to a model. Plain Python: settings are checked without MLX."""

from __future__ import annotations

import re
from dataclasses import dataclass

# MLX's fixed groups of small floats, and the groups of its affine codes, largest first.
SMALL_FLOATS = {"mxfp8": (8, 32), "mxfp4": (4, 32), "nvfp4": (4, 16)}
_AFFINE_BITS = (8, 6, 5, 4, 3, 2)
_AFFINE_GROUPS = (128, 64, 32)
_DEFAULT_GROUP = 64
TURBO_BITS = {"turbo4": 4, "turbo3": 3}
_PAIRS = {"turbo3.5": ("turbo4", "turbo3")}  # one name for keys and values that differ

_BASES = ("float", *(f"affine{bits}" for bits in _AFFINE_BITS), *SMALL_FLOATS, *TURBO_BITS)
SCHEMES = (*_BASES, *_PAIRS)
_KNOWN = (
    f"{', '.join(SCHEMES)}, pairs of bits for keys and values like k8v4, and rotated schemes "
    "like affine4r"
)


@dataclass(frozen=True, slots=True)
class TensorName:
    """A scheme for one tensor as its user names it, not yet fitted to a head size.

    ``base`` is one of ``SCHEMES`` that is not a pair; ``group`` is the largest group that may be
    taken, None for the default, which is 64 and for small floats their only one.
    """

    base: str
    rotated: bool = False
    group: int | None = None

    @classmethod
    def parse(cls, text: str) -> TensorName:
        """``affine4``, ``affine4r`` (rotated), ``affine4/32`` (groups of 32 at most).

        Raises ValueError, one sentence, for an unknown name or a group that it cannot have.
        """
        name, slash, group_text = text.partition("/")
        base = name.removesuffix("r")
        rotated = base != name
        if base not in _BASES or (rotated and (base == "float" or base in TURBO_BITS)):
            pairs = f"; {name} is for keys and values at once" if name in _PAIRS else ""
            raise ValueError(f"unknown KV scheme {name!r}; known: {_KNOWN}{pairs}")
        groups = _groups(base)
        if slash and group_text not in map(str, groups):
            known = " or ".join(map(str, groups)) or "none"
            raise ValueError(f"KV scheme {name!r} has no groups of {group_text!r}; it has {known}")
        group = int(group_text) if slash else None
        default = groups[0] if base in SMALL_FLOATS else _DEFAULT_GROUP
        return cls(base, rotated, None if group == default else group)

    @property
    def is_turbo(self) -> bool:
        return self.base in TURBO_BITS

    def group_for(self, size: int) -> int | None:
        """The largest group allowed that divides vectors of ``size`` numbers; None: keep float.

        MLX packs whole groups only. Where 32 does not divide the size the tensor stays float too,
        nvfp4's groups of 16 notwithstanding: MLX's kernels take columns by 32 unasked, and
        ``mlx.core.quantize`` on CPU raises on an odd number of such vectors.
        """
        largest = self.group or _DEFAULT_GROUP
        fitting = (g for g in _groups(self.base) if g <= largest and size % max(g, 32) == 0)
        return next(fitting, None)

    def __str__(self) -> str:
        name = f"{self.base}r" if self.rotated else self.base
        return name if self.group is None else f"{name}/{self.group}"


def _groups(base: str) -> tuple[int, ...]:
    """Groups that a scheme can have, largest first; none for float."""
    if base == "float":
        return ()
    if base in SMALL_FLOATS:
        return (SMALL_FLOATS[base][1],)
    return _AFFINE_GROUPS


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names for the keys and for the values of a layer."""

    keys: TensorName
    values: TensorName

    @classmethod
    def parse(cls, text: str) -> TensorNames:
        """One name for both, ``KEYS+VALUES``, or ``k8v4`` for ``affine8+affine4``.

        ``turbo3.5`` is ``turbo4+turbo3``. ``k8v4/32`` gives both that group. Raises ValueError, one
        sentence.
        """
        pair, slash, size = text.partition("/")
        if short := re.fullmatch(r"k([0-9]+)v([0-9]+)(/.*)?", text):
            keys, values, group = short.groups(default="")
            names = [f"affine{keys}{group}", f"affine{values}{group}"]
        elif pair in _PAIRS:
            names = [f"{name}{slash}{size}" for name in _PAIRS[pair]]
        else:
            names = text.split("+")
        if len(names) > 2:
            raise ValueError(f"KV scheme {text!r} names {len(names)} tensors; keys+values are two")
        return cls(TensorName.parse(names[0]), TensorName.parse(names[-1]))

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys}+{self.values}"
