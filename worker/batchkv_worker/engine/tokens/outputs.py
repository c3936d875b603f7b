"""Turns sampled tokens into outputs: when a row has ended, its text, its log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any, Protocol

from batchkv_producer.wire.choice import ToolCall
from batchkv_producer.wire.job import TokenLogprob, Usage
from batchkv_worker.engine.tokens.sampling import Sampled
from batchkv_worker.events import Completed
from batchkv_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of a row's output. ``num_reasoning``: tokens of the thought, without markers."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_reasoning: int = 0


class Reader(Protocol):
    """Divides the output of a row, whose model may think or call a tool, into its parts."""

    def read(self, job_id: str, text: str, tokens: Tokens[int]) -> Answer: ...


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
    cut = _take_token(row, read.tokens[index], tokenizer)
    if row.generation.logprobs is not None:
        row.logprobs.append(_logprob(row, index, read, tokenizer))
    return _completed(row, tokenizer, cut) if row.is_ended else None


def text_of(tokens: Iterable[int], tokenizer: Any, hidden: Collection[int] = ()) -> str:
    """The text of tokens, without those that are hidden."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        _add(detokenizer, token, hidden)
    detokenizer.finalize()
    return str(detokenizer.text)


def _take_token(row: Sequence, token: int, tokenizer: Any) -> int | None:
    """Append a token, and end the row if it is the last. Returns where a stop string cuts it."""
    row.generated.append(token)
    if _is_end(row, token, tokenizer):
        row.end("stop")
        return None
    cut = _add_and_find_stop(row, token, tokenizer)
    if cut is not None:
        row.end("stop")
    elif len(row.generated) >= row.generation.max_tokens:
        row.end("length")
    return cut


def _is_end(row: Sequence, token: int, tokenizer: Any) -> bool:
    asked = row.generation
    if token in asked.stop_token_ids:
        return True
    if token not in tokenizer.eos_token_ids:
        return False
    return not asked.ignore_eos or (row.guide is not None and row.guide.is_over)


def _add(detokenizer: Any, token: int, hidden: Collection[int]) -> None:
    """Add a token's text; ids in a padded vocabulary that the tokenizer lacks have none."""
    if token in hidden:
        return
    try:  # for each token, so no ``suppress``: making one takes a fifth of this
        detokenizer.add_token(token)
    except (IndexError, KeyError, TypeError):
        return


def _add_and_find_stop(row: Sequence, token: int, tokenizer: Any) -> int | None:
    if row.detokenizer is None:
        return None
    asked = row.generation
    _add(row.detokenizer, token, asked.hidden_tokens)
    if len(row.generated) > asked.min_tokens:
        return _find_stop(row.detokenizer.text, row)
    if len(row.generated) == asked.min_tokens:
        text = text_of(row.generated, tokenizer, asked.hidden_tokens)
        row.num_exempt_chars = len(text.rstrip("\ufffd"))  # without a character that is not whole
    return None


def _find_stop(text: str, row: Sequence) -> int | None:
    """Where the stop string that begins first cuts the text; None if there is none.

    The text ends before the stop string, or after it if the row asked for that.
    """
    found = []
    for stop in row.generation.stop:
        at = text.find(stop, max(0, row.num_exempt_chars - len(stop) + 1))
        if at >= 0:
            found.append((at, at + len(stop) if row.generation.include_stop else at))
    return min(found)[1] if found else None


def _completed(row: Sequence, tokenizer: Any, cut: int | None) -> Completed:
    text = _text(row, tokenizer)
    if cut is None and len(row.generated) > row.generation.min_tokens:
        cut = _find_stop(text, row)  # in the end of the text, which the detokenizer held back
    finish_reason = row.finish_reason if cut is None else "stop"
    answer = _answer(row, text[:cut], tokenizer)
    if answer.tool_calls and finish_reason == "stop":
        finish_reason = "tool_calls"
    return Completed(
        job_id=row.job_id,
        text=answer.text,
        finish_reason=finish_reason,
        usage=Usage(len(row.prompt), len(row.generated), row.num_cached, answer.num_reasoning),
        token_ids=tuple(row.generated),
        logprobs=tuple(row.logprobs) if row.generation.logprobs is not None else None,
        prompt_token_ids=tuple(row.prompt) if row.generation.return_token_ids else None,
        reasoning=answer.reasoning,
        tool_calls=answer.tool_calls,
    )


def _answer(row: Sequence, text: str, tokenizer: Any) -> Answer:
    """The parts of the output's text."""
    reader: Reader | None = row.reader
    if reader is None:
        return Answer(text)
    is_ended = _is_end(row, row.generated[-1], tokenizer)
    tokens = row.generated[:-1] if is_ended else row.generated
    return reader.read(row.job_id, text, tokens)


def _text(row: Sequence, tokenizer: Any) -> str:
    """The text of the output. Its end token is not part of it, unless the row asked for that."""
    asked, last = row.generation, row.generated[-1]
    is_left_out = _is_end(row, last, tokenizer) and not asked.include_stop
    if row.detokenizer is None:
        tokens = row.generated[:-1] if is_left_out else row.generated
        return text_of(tokens, tokenizer, asked.hidden_tokens)
    if _is_end(row, last, tokenizer) and asked.include_stop:
        _add(row.detokenizer, last, asked.hidden_tokens)
    row.detokenizer.finalize()
    return str(row.detokenizer.text)


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
