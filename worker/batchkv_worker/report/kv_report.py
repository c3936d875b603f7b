"""``batchkv kv-report``: measures the costs and savings of KV schemes on one model and device.

All figures are measured. Bytes are those of filled arrays, errors those of the model's own
attention, and times those of the engine's decode slots. The baseline is float in the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from batchkv_worker.errors import SettingsError
from batchkv_worker.kv.backends import device
from batchkv_worker.kv.schemes.packing import fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.start.backend import choose_backend
from batchkv_worker.kv.start.plan import KvPlan, make_plan
from batchkv_worker.model.loader import LoadedModel, load
from batchkv_worker.report.capture import AttentionSample
from batchkv_worker.report.quality import Reading, measured_bytes, read
from batchkv_worker.report.results import Quality, Report, SchemeReport
from batchkv_worker.report.speed import Decoding, in_turns
from batchkv_worker.report.text import read_text

FEWEST_TOKENS = 32  # with fewer, a perplexity means nothing
_ERROR_TOKENS = 512  # for the error of attention, because its inputs for all layers are in memory
_BASELINE = "float"


@dataclass(frozen=True, slots=True)
class Extent:
    """The most tokens of the text; the number and the length of the rows in decode."""

    tokens: int = 2048
    rows: int = 8
    row_tokens: int = 1024


def report(
    model: str,
    schemes: Sequence[str],
    text_file: Path | None,
    dtype: str,
    extent: Extent,
    note: Callable[[str], None],
) -> Report:
    """Load ``model`` and measure the schemes. ``note`` receives the current step.

    Raises ModelError, and SettingsError for an unusable text, or a scheme with a rule for a layer
    that the model does not have.
    """
    called, text = read_text(text_file)  # before a download of the model
    device.prepare_device(wired_limit=False)
    note(f"loading {model}")
    loaded = load(model, dtype, before_reading=choose_backend().unpack_weights)
    tokens = [int(token) for token in loaded.tokenizer.encode(text)]
    return measure(loaded, schemes, called, tokens, extent, note)


def measure(
    loaded: LoadedModel,
    schemes: Sequence[str],
    text_name: str,
    tokens: list[int],
    extent: Extent,
    note: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure the schemes (canonical names) on a loaded model; float always comes first."""
    _check(loaded, schemes)
    tokens = tokens[: min(extent.tokens, loaded.context)]
    if len(tokens) < FEWEST_TOKENS:
        raise SettingsError(
            f"--text {text_name}: has {len(tokens)} tokens; at least {FEWEST_TOKENS} are needed"
        )
    names = list(dict.fromkeys([_BASELINE, *schemes]))

    def note_scheme(name: str) -> None:
        note(f"measuring {name} ({names.index(name) + 1} of {len(names)})")

    measuring = _Measuring(loaded, tokens, extent, note_scheme)
    return Report(
        model=loaded.name,
        layers=str(loaded.caches),
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        device=device.name(),
        mlx=mx.__version__,
        text=text_name,
        text_tokens=len(tokens),
        error_tokens=measuring.sample.num_tokens,
        decode_rows=extent.rows,
        decode_tokens=measuring.row_tokens,
        schemes=tuple(measuring.scheme(name) for name in names),
    )


def _check(loaded: LoadedModel, schemes: Sequence[str]) -> None:
    """Refuse a scheme that does not fit the model, before any measurement."""
    for name in schemes:
        try:
            fit_model(SchemeSpec.parse(name), loaded.caches.shapes)
        except ValueError as fault:
            raise SettingsError(f"--schemes {name}: {fault}") from fault


class _Measuring:
    """Measures schemes on a model and a text; the results for float are kept for comparison."""

    def __init__(
        self, loaded: LoadedModel, tokens: list[int], extent: Extent, note: Callable[[str], None]
    ) -> None:
        self._loaded, self._backend = loaded, choose_backend()
        self._tokens = tokens
        self._rows = extent.rows
        self._note = note
        self.row_tokens = min(extent.row_tokens, loaded.context)
        # A row of the requested length; a short text is repeated.
        self._row = (tokens * -(-self.row_tokens // len(tokens)))[: self.row_tokens]
        note(_BASELINE)
        self._exact = self._plan(_BASELINE)
        self.sample = AttentionSample(
            *(self._backend, loaded.model, loaded.caches, self._exact.kinds),
            tokens[:_ERROR_TOKENS],
        )
        self._reading = self._read(self._exact, tokens)
        self._exact_row = self._read(self._exact, self._row).pieces

    def scheme(self, name: str) -> SchemeReport:
        """Measure one scheme."""
        is_baseline = name == _BASELINE
        if not is_baseline:
            self._note(name)
        plan = self._exact if is_baseline else self._plan(name)
        reading = self._reading if is_baseline else self._read(plan, self._tokens)
        row = self._exact_row if is_baseline else self._read(plan, self._row).pieces
        own = Decoding(self._loaded.model, plan, self._rows, row, self.row_tokens)
        other = Decoding(
            self._loaded.model, self._exact, self._rows, self._exact_row, self.row_tokens
        )
        step = in_turns(own.step, other.step)
        attention = in_turns(own.attention, other.attention) if own.has_attention else None
        return SchemeReport(
            scheme=name,
            kinds=measured_bytes(plan.kinds, reading.pieces),
            error=self.sample.error(plan.kinds),
            quality=Quality(reading.perplexity, reading.agreement(self._reading)),
            step=step,
            attention=attention,
            paths=own.paths,
        )

    def _plan(self, name: str) -> KvPlan:
        """The plan that the engine would make for the scheme."""
        loaded = self._loaded
        return make_plan(
            loaded.name,
            loaded.model,
            loaded.caches,
            name,
            loaded.dtype,
            self._backend,
            slots=self._rows,
        )

    def _read(self, plan: KvPlan, tokens: list[int]) -> Reading:
        return read(self._backend, self._loaded.model, self._loaded.caches, plan.kinds, tokens)
