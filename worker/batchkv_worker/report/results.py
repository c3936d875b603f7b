"""The contents of a report as plain data, for tables and JSON. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KindBytes:
    """The measured bytes of all layers of one kind.

    ``fitted``: the scheme in use. It differs from the requested one if its groups do not divide a
    head. ``bytes_per_row``: of a state, which does not depend on the row's length.
    """

    kind: str
    layers: int
    fitted: str
    bytes_per_token: float
    bytes_per_row: int


@dataclass(frozen=True, slots=True)
class Error:
    """The error of the attention layers' outputs, relative to float: mean and worst over layers.

    ``worst_layer``: its number among the layers with keys and values, from 0.
    """

    mean: float
    worst: float
    worst_layer: int


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexity of a text, and the share of tokens after which float predicts the same."""

    perplexity: float
    same_prediction: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Median milliseconds of a scheme and of float, measured alternately."""

    milliseconds: float
    float_milliseconds: float

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.float_milliseconds


@dataclass(frozen=True, slots=True)
class SchemeReport:
    """One scheme on the model; ``error`` and ``attention`` are None without attention layers.

    ``paths``: how decode computes attention. It is the fastest way by measurement, or ``dense`` for
    a model that reads dense keys and values and computes attention itself.
    """

    scheme: str
    kinds: tuple[KindBytes, ...]
    error: Error | None
    quality: Quality
    step: Timing
    attention: Timing | None
    paths: tuple[str, ...]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all layers, while it is in every window."""
        return sum(kind.bytes_per_token for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Report:
    """All schemes on one model and device; float, the baseline, comes first."""

    model: str
    layers: str
    dtype: str
    device: str
    mlx: str
    text: str
    text_tokens: int
    error_tokens: int
    decode_rows: int
    decode_tokens: int
    schemes: tuple[SchemeReport, ...]

    def perplexity_change(self, scheme: SchemeReport) -> float:
        """The change of perplexity relative to float; 0.01 is one percent more."""
        return scheme.quality.perplexity / self.schemes[0].quality.perplexity - 1

    def as_json(self) -> dict[str, Any]:
        """The report as plain values, with the ratios of its tables."""
        document = asdict(self)
        for written, scheme in zip(document["schemes"], self.schemes, strict=True):
            written["bytes_per_token"] = scheme.bytes_per_token
            written["quality"]["perplexity_change"] = self.perplexity_change(scheme)
            written["step"]["ratio"] = scheme.step.ratio
            if scheme.attention is not None:
                written["attention"]["ratio"] = scheme.attention.ratio
        return document
