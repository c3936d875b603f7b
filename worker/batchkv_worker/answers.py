"""From sampled tokens to an answer: when a row has ended, its text, its log-probabilities."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from batchkv_producer.job import TokenLogprob, Usage
from batchkv_worker.events import Completed
from batchkv_worker.sampling import Sampled
from batchkv_worker.sequence import Sequence


def take_token(row: Sequence, token: int, end_tokens: Collection[int]) -> None:
    """Add a token that was read back, and end the row if it is its last."""
    row.generated.append(token)
    if token in end_tokens or _hits_stop(row, token):
        row.finish_reason = "stop"
    elif len(row.generated) >= row.generation.max_tokens:
        row.finish_reason = "length"


def _hits_stop(row: Sequence, token: int) -> bool:
    if row.detokenizer is None:
        return False
    row.detokenizer.add_token(token)
    return _find_stop(row.detokenizer.text, row.generation.stop) is not None


def _find_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the first of the stop strings begins."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def completed(row: Sequence, tokenizer: Any) -> Completed:
    """The event of a row that has ended."""
    return Completed(
        job_id=row.job_id,
        text=_text(row, tokenizer),
        finish_reason=row.finish_reason,
        usage=Usage(len(row.prompt), len(row.generated), row.num_cached),
        token_ids=tuple(row.generated),
        logprobs=tuple(row.logprobs) if row.generation.logprobs is not None else None,
    )


def _text(row: Sequence, tokenizer: Any) -> str:
    """The answer without end token and without what follows a stop string."""
    detokenizer = row.detokenizer
    if detokenizer is None:
        detokenizer = tokenizer.detokenizer
        has_end = row.generated[-1] in tokenizer.eos_token_ids
        for token in row.generated[:-1] if has_end else row.generated:
            detokenizer.add_token(token)
    detokenizer.finalize()
    text: str = detokenizer.text
    cut = _find_stop(text, row.generation.stop)
    return text if cut is None else text[:cut]


def logprob_of(sampled: Sampled, index: int, row: Sequence, tokenizer: Any) -> TokenLogprob:
    """Log-probability of the row's newest token, with as many alternatives as it asked for."""
    assert sampled.chosen is not None
    top: list[tuple[str, float]] = []
    count = row.generation.logprobs
    if count and sampled.top_tokens is not None and sampled.top_logprobs is not None:
        likeliest: list[int] = sampled.top_tokens[index, :count].tolist()
        values: list[float] = sampled.top_logprobs[index, :count].tolist()
        top = [(_piece(token, tokenizer), p) for token, p in zip(likeliest, values, strict=True)]
    token = _piece(row.generated[-1], tokenizer)
    return TokenLogprob(token, sampled.chosen[index].item(), tuple(top))


def _piece(token: int, tokenizer: Any) -> str:
    return str(tokenizer.decode([token]))
