"""The contract of guides: they decide on the host which tokens a row may sample next. No MLX.

A guide sees each token of its row, once and in order, and fills a bit mask for the next one. The
mask of a token needs the token before it. So a step with a guided row starts its logits first. The
host reads the last tokens and fills the masks while the device computes. Then the step samples.

A row has at most one guide. ``engine.tokens.guide`` has what makes one of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask: TypeAlias = NDArray[np.uint32]  # a bit a token; token 0 is the first word's lowest


class GuideFault(Exception):
    """A guide cannot go on; the message names the reason, and the row ends with it."""


class Guide(Protocol):
    """Decides which tokens one row may sample.

    ``is_over``: only an end token may follow. All methods may raise ``GuideFault``.
    """

    @property
    def is_over(self) -> bool: ...

    def fill(self, allowed: Mask) -> None:
        """Clear the bits of the tokens that the row may not sample next, and set none.

        ``allowed`` ``[words]`` has a bit for each token of the vocabulary. It comes all set, or as
        other guides of the row left it. It is used again after the call.
        """

    def take(self, token: int) -> None:
        """The row has this token next."""

    def restart(self, tokens: Sequence[int]) -> None:
        """Forget all, and take these tokens: all that the row has generated."""

    def fresh(self) -> Guide:
        """A guide of the same kind for another row, which has taken nothing."""
        ...

    def and_then(self, grammar: Guide) -> Guide:
        """This guide together with a grammar, which is compiled after the row came in.

        Most guides let both decide (``AllOf``). One that waits for the end of a thought lets the
        grammar begin there.
        """
        ...
