"""What a report says. Plain data: it is shown and written as JSON without MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KindBytes:
    """The layers of one kind together, as their arrays were found to be.

    ``fitted`` names what they keep, which differs from the scheme asked for where its groups do not
    divide a head. ``bytes_per_row`` is a state's, whatever the row's length.
    """

    kind: str
    layers: int
    fitted: str
    bytes_per_token: float
    bytes_per_row: int


@dataclass(frozen=True, slots=True)
class Error:
    """Error of the attention layers' outputs, relative to float: mean and worst over layers.

    ``worst_layer`` counts the layers that keep keys and values, from 0.
    """

    mean: float
    worst: float
    worst_layer: int


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a text: perplexity, and the share of tokens after which float predicts the same."""

    perplexity: float
    same_prediction: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Median milliseconds of a scheme and of float, measured in turns."""

    milliseconds: float
    float_milliseconds: float

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.float_milliseconds


@dataclass(frozen=True, slots=True)
class SchemeReport:
    """One scheme on the model; ``error`` and ``attention`` are None without attention layers.

    ``paths`` are how decode computes attention: as measured to be fastest, or ``dense`` where the
    model reads dense keys and values and computes it itself.
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
        """Of all layers, while the token is in every window."""
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
        """Relative to float: 0.01 is one percent more."""
        return scheme.quality.perplexity / self.schemes[0].quality.perplexity - 1

    def as_json(self) -> dict[str, Any]:
        """The report as plain values, with the ratios that its tables show."""
        document = asdict(self)
        for written, scheme in zip(document["schemes"], self.schemes, strict=True):
            written["bytes_per_token"] = scheme.bytes_per_token
            written["quality"]["perplexity_change"] = self.perplexity_change(scheme)
            written["step"]["ratio"] = scheme.step.ratio
            if scheme.attention is not None:
                written["attention"]["ratio"] = scheme.attention.ratio
        return document
