"""Turns sampled tokens into outputs: when a row has ended, its text, its log-probabilities."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from batchkv_producer.wire.job import TokenLogprob, Usage
from batchkv_worker.engine.tokens.sampling import Sampled
from batchkv_worker.events import Completed
from batchkv_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The results of a step on the host, by row; one transfer for each array."""

    tokens: list[int]
    chosen: list[float]
    top_tokens: list[list[int]]
    top_logprobs: list[list[float]]


def read_back(sampled: Sampled) -> ReadBack:
    """Wait for a step and copy its results to the host."""

    def fetched(array: Any) -> Any:
        return [] if array is None else array.tolist()

    return ReadBack(
        fetched(sampled.tokens),
        fetched(sampled.chosen),
        fetched(sampled.top_tokens),
        fetched(sampled.top_logprobs),
    )


def take(row: Sequence, index: int, read: ReadBack, tokenizer: Any) -> Completed | None:
    """Give the row its token of a step. Returns its event if that was its last token."""
    stop_start = _take_token(row, read.tokens[index], tokenizer.eos_token_ids)
    if row.generation.logprobs is not None:
        row.logprobs.append(_logprob(row, index, read, tokenizer))
    return _completed(row, tokenizer, stop_start) if row.is_ended else None


def _take_token(row: Sequence, token: int, end_tokens: Collection[int]) -> int | None:
    """Append a token, and end the row if it is the last. Returns where a stop string begins."""
    row.generated.append(token)
    if token in end_tokens:
        row.end("stop")
        return None
    stop_start = _add_and_find_stop(row, token)
    if stop_start is not None:
        row.end("stop")
    elif len(row.generated) >= row.generation.max_tokens:
        row.end("length")
    return stop_start


def _add(detokenizer: Any, token: int) -> None:
    """Add a token's text; ids in a padded vocabulary that the tokenizer lacks have none."""
    with suppress(IndexError, KeyError, TypeError):
        detokenizer.add_token(token)


def _add_and_find_stop(row: Sequence, token: int) -> int | None:
    if row.detokenizer is None:
        return None
    _add(row.detokenizer, token)
    return _find_stop(row.detokenizer.text, row.generation.stop)


def _find_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """The start of the stop string that begins first, or None."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def _completed(row: Sequence, tokenizer: Any, stop_start: int | None) -> Completed:
    text = _text(row, tokenizer)
    if stop_start is None:  # the end of the text, which the detokenizer held back, may have one
        stop_start = _find_stop(text, row.generation.stop)
    return Completed(
        job_id=row.job_id,
        text=text if stop_start is None else text[:stop_start],
        finish_reason=row.finish_reason if stop_start is None else "stop",
        usage=Usage(len(row.prompt), len(row.generated), row.num_cached),
        token_ids=tuple(row.generated),
        logprobs=tuple(row.logprobs) if row.generation.logprobs is not None else None,
    )


def _text(row: Sequence, tokenizer: Any) -> str:
    """The text of the output, without its end token."""
    detokenizer = row.detokenizer
    if detokenizer is None:
        detokenizer = tokenizer.detokenizer
        has_end = row.generated[-1] in tokenizer.eos_token_ids
        for token in row.generated[:-1] if has_end else row.generated:
            _add(detokenizer, token)
    detokenizer.finalize()
    return str(detokenizer.text)


def _logprob(row: Sequence, index: int, read: ReadBack, tokenizer: Any) -> TokenLogprob:
    """Log-probability of the row's newest token, with as many alternatives as it asked for."""
    count = row.generation.logprobs
    top: list[tuple[str, float]] = []
    if count and read.top_tokens:
        pairs = zip(read.top_tokens[index][:count], read.top_logprobs[index][:count], strict=True)
        top = [(_piece(token, tokenizer), logprob) for token, logprob in pairs]
    return TokenLogprob(_piece(row.generated[-1], tokenizer), read.chosen[index], tuple(top))


def _piece(token: int, tokenizer: Any) -> str:
    return str(tokenizer.decode([token]))
