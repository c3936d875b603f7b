"""The CUDA source of the kernel for shared prefixes, made for a number of prefixes and partials."""

from __future__ import annotations

import re
from dataclasses import dataclass

WARPS = 8  # of 32 threads; they divide the columns of one row and one KV head among them
_LEAST = "-1e30f"  # below every score; masked columns are skipped

# There is one block of threads for each row and KV head. Its lines are the query heads of that KV
# head.
_SOURCE = """
  constexpr int KEY_EACH = KEY_SIZE / 32;
  constexpr int VALUE_EACH = VALUE_SIZE / 32;
  __shared__ float tops[WARPS][LINES];
  __shared__ float sums[WARPS][LINES];
  __shared__ float outputs[WARPS][LINES][VALUE_SIZE];
  const int head = blockIdx.x;
  const int row = blockIdx.y;
  const int rows = gridDim.y;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int columns = keys_shape[2];
  const size_t first = (size_t(head) * rows + row) * LINES;  // line in arrays with heads first
  const T* own_keys = keys + row * keys_strides[0] + head * keys_strides[1];
  const T* own_values = values + row * values_strides[0] + head * values_strides[1];

  // The row's own columns, the suffix: each warp reads every WARPS-th column.
  float query[LINES][KEY_EACH];
  float sum_of[LINES][VALUE_EACH];
  float top[LINES];
  float sum[LINES];
  for (int line = 0; line < LINES; ++line) {
    const size_t place = ((size_t(row) * gridDim.x + head) * LINES + line) * KEY_SIZE;
    for (int i = 0; i < KEY_EACH; ++i) {
      query[line][i] = static_cast<float>(queries[place + i * 32 + lane]);
    }
    for (int i = 0; i < VALUE_EACH; ++i) {
      sum_of[line][i] = 0.0f;
    }
    top[line] = LEAST;
    sum[line] = 0.0f;
  }
  for (int column = warp; column < columns; column += WARPS) {
    SKIP
    float key[KEY_EACH];
    float value[VALUE_EACH];
    for (int i = 0; i < KEY_EACH; ++i) {
      key[i] = static_cast<float>(
          own_keys[column * keys_strides[2] + (i * 32 + lane) * keys_strides[3]]);
    }
    for (int i = 0; i < VALUE_EACH; ++i) {
      value[i] = static_cast<float>(
          own_values[column * values_strides[2] + (i * 32 + lane) * values_strides[3]]);
    }
    for (int line = 0; line < LINES; ++line) {
      float score = 0.0f;
      for (int i = 0; i < KEY_EACH; ++i) {
        score += query[line][i] * key[i];
      }
      for (int other = 16; other > 0; other /= 2) {
        score += __shfl_xor_sync(0xffffffff, score, other);
      }
      const float higher = fmaxf(top[line], score);
      const float before = __expf(top[line] - higher);
      const float weight = __expf(score - higher);
      top[line] = higher;
      sum[line] = sum[line] * before + weight;
      for (int i = 0; i < VALUE_EACH; ++i) {
        sum_of[line][i] = sum_of[line][i] * before + weight * value[i];
      }
    }
  }

  // The highest score of prefixes, suffix and partials.
  for (int line = 0; line < LINES; ++line) {
    float highest = top[line];
    HIGHEST
    for (int other = 16; other > 0; other /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, other));
    }
    if (lane == 0) {
      tops[warp][line] = highest;
    }
  }
  __syncthreads();
  float all_top[LINES];
  for (int line = 0; line < LINES; ++line) {
    float highest = tops[0][line];
    for (int other = 1; other < WARPS; ++other) {
      highest = fmaxf(highest, tops[other][line]);
    }
    ALSO_HIGHEST
    all_top[line] = highest;
  }

  // The sum of all weights, by which each is divided.
  for (int line = 0; line < LINES; ++line) {
    float total = 0.0f;
    TOTAL
    for (int other = 16; other > 0; other /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, other);
    }
    const float share = __expf(top[line] - all_top[line]);
    if (lane == 0) {
      sums[warp][line] = total + sum[line] * share;
    }
    for (int i = 0; i < VALUE_EACH; ++i) {
      outputs[warp][line][i * 32 + lane] = sum_of[line][i] * share;
    }
  }
  __syncthreads();
  float all_sum[LINES];
  for (int line = 0; line < LINES; ++line) {
    float total = 0.0f;
    for (int other = 0; other < WARPS; ++other) {
      total += sums[other][line];
    }
    ALSO_TOTAL
    all_sum[line] = total;
  }

  for (int line = 0; line < LINES; ++line) {
    WEIGHTS
    for (int i = threadIdx.x; i < VALUE_SIZE; i += WARPS * 32) {
      float number = 0.0f;
      for (int other = 0; other < WARPS; ++other) {
        number += outputs[other][line][i];
      }
      ALSO_OUTPUT
      suffix_output[(first + line) * VALUE_SIZE + i] = static_cast<T>(number / all_sum[line]);
    }
  }
"""

# A loop over the scores of prefix number ``{n}``, with the statement ``{what}`` for each.
_SCORES = """
    for (int i = threadIdx.x; i < prefix_scores{n}_shape[3]; i += WARPS * 32) {{
      const size_t place = (first + line) * prefix_scores{n}_shape[3] + i;
      const float score = static_cast<float>(prefix_scores{n}[place]);
      {what}
    }}"""
_HIGHEST = "highest = fmaxf(highest, score);"
_TOTAL = "total += __expf(score - all_top[line]);"
_WEIGHT = "weights{n}[place] = static_cast<T>(__expf(score - all_top[line]) / all_sum[line]);"


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the kernel: the numbers of prefixes and partials, and its other inputs."""

    prefixes: int
    partials: int
    has_mask: bool
    has_sinks: bool

    @property
    def name(self) -> str:
        flags = ("m" if self.has_mask else "") + ("s" if self.has_sinks else "")
        return f"batchkv_prefix_{self.prefixes}_{self.partials}{flags}"

    @property
    def inputs(self) -> list[str]:
        return [
            *("queries", "keys", "values"),
            *(f"prefix_scores{n}" for n in range(self.prefixes)),
            *(f"{what}{n}" for n in range(self.partials) for what in ("score", "value")),
            *(["mask"] if self.has_mask else []),
            *(["sinks"] if self.has_sinks else []),
        ]

    @property
    def outputs(self) -> list[str]:
        return ["suffix_output", *(f"weights{n}" for n in range(self.prefixes))]

    @property
    def source(self) -> str:
        scores = [_at(f"score{n}") for n in range(self.partials)]
        values = [_at(f"value{n}", "i") for n in range(self.partials)]
        sink = ["static_cast<float>(sinks[head * LINES + line])"] if self.has_sinks else []
        others = scores + sink
        parts = {
            "SKIP": "if (!mask[row * columns + column]) continue;" if self.has_mask else "",
            "ALSO_HIGHEST": "".join(f"highest = fmaxf(highest, {other});" for other in others),
            "ALSO_TOTAL": "".join(f"total += __expf({other} - all_top[line]);" for other in others),
            "ALSO_OUTPUT": "".join(
                f"number += __expf({score} - all_top[line]) * static_cast<float>({value});"
                for score, value in zip(scores, values, strict=True)
            ),
            "HIGHEST": self._of_each(_HIGHEST),
            "TOTAL": self._of_each(_TOTAL),
            "WEIGHTS": self._of_each(_WEIGHT),
            "LEAST": _LEAST,
        }
        return re.sub("|".join(rf"\b{name}\b" for name in parts), lambda m: parts[m[0]], _SOURCE)

    def _of_each(self, what: str) -> str:
        return "".join(_SCORES.format(n=n, what=what.format(n=n)) for n in range(self.prefixes))


def _at(name: str, last: str | None = None) -> str:
    """A number in an array of a partial, whose heads come first, by its strides."""
    indexes = ["head", "row", "line", *([last] if last else [])]
    places = [f"{index} * {name}_strides[{axis}]" for axis, index in enumerate(indexes)]
    return f"{name}[{' + '.join(places)}]"
