"""Products with packed weights on CUDA: which a model has, and all of their rows at once.

MLX has a kernel for up to 7 rows in its library. For more it has a program, which it compiles when
such a product first comes: for 16, 32 or 64 rows, and for each dtype, number of bits and group.

It takes the last two dimensions of an input as a matrix, and those before for numbers of matrices.
The rows of a decode step are such a dimension, so each would be multiplied apart, in a matrix of 16
rows (``make_problem_shape`` in its ``cuda/quantized/qmm/qmm_utils.h``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

ROWS = (16, 32, 64)  # the sizes of such a matrix; more rows are several
_COLUMNS, _LEAST_INPUTS = 128, 64  # multiples for which MLX has other kernels
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """A product with packed weights ``[outputs, inputs]``; ``dtype`` is the input's, by name."""

    dtype: str
    mode: str
    bits: int
    group_size: int
    inputs: int
    outputs: int

    @property
    def kernel(self) -> str:
        """A name of the kernels that it needs: products of the same name share them."""
        is_even = self.outputs % _COLUMNS == 0
        is_whole = self.inputs % max(_LEAST_INPUTS, self.group_size) == 0
        return f"{self.mode}-{self.bits}-{self.group_size}-{self.dtype}-{is_even:d}{is_whole:d}"

    def compute(self, rows: int) -> None:
        """Multiply so many rows of zeros with packed zeros."""
        weights = mx.zeros((self.outputs, self.inputs), getattr(mx, self.dtype))
        kind: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        packed = mx.quantize(weights, **kind)
        x = mx.zeros((rows, self.inputs), weights.dtype)
        mx.eval(mx.quantized_matmul(x, *packed, transpose=True, **kind))

    def as_dict(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return asdict(self)


def products_of(model: Any, dtype: mx.Dtype) -> list[PackedProduct]:
    """One product for each kernel that the layers of ``model`` need, the smallest one."""
    found: dict[str, PackedProduct] = {}
    name = str(dtype).rpartition(".")[2]
    for module in model.modules():
        if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        outputs, inputs = size_of(module)
        kind = module.mode, module.bits, module.group_size
        product = PackedProduct(name, *kind, inputs, outputs)
        known = found.setdefault(product.kernel, product)
        if inputs * outputs < known.inputs * known.outputs:
            found[product.kernel] = product
    return [*found.values()]


def size_of(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a layer with packed weights."""
    outputs, words = module.weight.shape
    return int(outputs), int(words) * _WORD_BITS // int(module.bits)


def join_rows() -> None:
    """Have MLX multiply all rows of an input with packed weights as one matrix, from now on."""
    original = mx.quantized_matmul
    if isinstance(original, _Joined):
        return
    mx.quantized_matmul = _Joined(original)


class _Joined:
    """``mx.quantized_matmul``, which gets weights of two dimensions with an input of two."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, x: mx.array, w: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if x.ndim < 3 or w.ndim != 2:
            return self.original(x, w, *args, **kwargs)
        *before, size = x.shape
        out = self.original(x.reshape(x.size // size, size), w, *args, **kwargs)
        return out.reshape(*before, out.shape[-1])
