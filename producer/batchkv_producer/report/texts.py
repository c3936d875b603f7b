"""The rows of a report that shows texts: a few hundred, each cut to a size that a page can show."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from redis import Redis

from batchkv_producer.manage.reconcile import jobs_in
from batchkv_producer.report.words import safe, seconds_text
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire.job import Request, Result

MAX_FAILED = 50  # the first failed rows
MAX_OTHERS = 150  # the first other rows
MAX_CHARS = 10_000  # of one text
MAX_CHOICES = 4
MAX_CALLS = 16
MAX_SHORT_CHARS = 200
STATES = (b"failed", b"canceled", b"stopped", b"finished", b"queued", b"started", b"deferred")


@dataclass(frozen=True, slots=True)
class Text:
    """The beginning of a text of ``num_chars`` characters, with its title."""

    title: str
    begin: str
    num_chars: int


@dataclass(frozen=True, slots=True)
class RowTexts:
    """A row and its texts. ``about`` says in a few words how it ended."""

    line: int
    custom_id: str
    outcome: str
    about: str
    answer: tuple[Text, ...]


class Excerpts:
    """Keeps the texts of the first rows. ``add`` gets all rows in the order of the input."""

    def __init__(self) -> None:
        self._failed: list[RowTexts] = []
        self._others: list[RowTexts] = []
        self.num_left_out = 0

    def add(self, row: StoredRow) -> None:
        """Keep a row's texts, if there is room."""
        is_failed = row.result.outcome == "failed"
        kept, most = (self._failed, MAX_FAILED) if is_failed else (self._others, MAX_OTHERS)
        if len(kept) < most:
            kept.append(_row_texts(row.line, row.result))
        else:
            self.num_left_out += 1

    @property
    def rows(self) -> list[RowTexts]:
        """The rows by line."""
        return sorted([*self._failed, *self._others], key=lambda row: row.line)

    @property
    def lines(self) -> list[int]:
        """The lines of the rows."""
        return [row.line for row in self.rows]


def stored_requests(connection: Redis, batch_id: str, lines: Collection[int]) -> dict[int, Request]:
    """Line -> request of the rows whose jobs still have theirs. Rows that are ok have none."""
    jobs = jobs_in(connection, batch_id, sorted(lines), STATES)
    return {line: request for _, line, request in jobs if request is not None}


def section(excerpts: Excerpts, requests: dict[int, Request]) -> str:
    """The rows with their prompts and answers, folded."""
    rows = excerpts.rows
    missing = sum(row.line not in requests for row in rows)
    notes = [f"{len(rows):,} rows, by line: the first {MAX_FAILED} failed ones, and others."]
    if excerpts.num_left_out:
        notes.append(f"{excerpts.num_left_out:,} more rows are left out.")
    if missing:
        notes.append(
            f"The prompts of {missing:,} rows are no longer on the server: --from FILE shows them."
        )
    words = " ".join(notes)
    blocks = "".join(_row(row, requests.get(row.line)) for row in rows)
    return f'<section><h2>Rows</h2><p class="note">{safe(words)}</p>{blocks}</section>'


def _row(row: RowTexts, request: Request | None) -> str:
    name = f" <bdi>{safe(row.custom_id)}</bdi>" if row.custom_id != f"line-{row.line}" else ""
    prompt = _side("Prompt", list(_prompt(request))) if request else ""
    answer = _side("Answer", list(row.answer))
    return (
        f'<details class="row"><summary>line {row.line}{name}: {safe(row.outcome)}'
        f'{safe(row.about)}</summary><div class="pair">{prompt}{answer}</div></details>'
    )


def _side(title: str, texts: list[Text]) -> str:
    blocks = "".join(map(_block, texts))
    return f"<div><h3>{title}</h3>{blocks or '<p class=note>nothing</p>'}</div>"


def _block(text: Text) -> str:
    cut = ""
    if text.num_chars > len(text.begin):
        cut = (
            f'<p class="note">Cut: the first {len(text.begin):,} of {text.num_chars:,} characters '
            "are shown.</p>"
        )
    head = f"<h4>{safe(text.title)}</h4>" if text.title else ""
    return f'{head}<pre dir="auto" tabindex="0">{safe(text.begin)}</pre>{cut}'


def _row_texts(line: int, result: Result) -> RowTexts:
    usage = result.usage
    about = f", {result.error[0]}" if result.error else ""
    if result.outcome == "ok":
        about = f", {usage.prompt:,} + {usage.completion:,} tokens"
        about += f" in {seconds_text(result.busy_ms)}" if result.busy_ms else ""
        about += ", cut at max_tokens" if result.finish_reason == "length" else ""
    return RowTexts(
        line,
        _short(result.custom_id),
        result.outcome,
        _short(about),
        tuple(_answer(result)),
    )


def _answer(result: Result) -> Iterator[Text]:
    """The texts of an answer: of each choice its reasoning, its text and its tool calls."""
    if result.error is not None:
        yield _text("", result.error[1])
        return
    choices = result.choices
    for number, choice in enumerate(choices[:MAX_CHOICES], 1):
        of = f" of choice {number}" if len(choices) > 1 else ""
        if choice.reasoning:
            yield _text(f"Reasoning{of}", choice.reasoning)
        if choice.text or not (choice.reasoning or choice.tool_calls):
            yield _text(f"Text{of}" if of or choice.reasoning else "", choice.text)
        for call in choice.tool_calls[:MAX_CALLS]:
            yield _text(f"Call of {_short(call.name)}{of}", call.arguments)
    if len(choices) > MAX_CHOICES:
        yield _text("", f"{len(choices) - MAX_CHOICES:,} more choices are left out")


def _prompt(request: Request) -> Iterator[Text]:
    """The texts of a prompt."""
    if request.system is not None:
        yield _text("system", request.system)
    for message in request.messages or ():
        content = message.get("content")
        text = content if isinstance(content, str) else _json(content)
        yield _text(_short(str(message.get("role", ""))), "" if content is None else text)
        if message.get("tool_calls"):
            yield _text("tool calls", _json(message["tool_calls"]))
    if request.prompt is not None:
        yield _text("", request.prompt)
    if request.prompt_tokens is not None:
        yield _text("token ids", " ".join(map(str, request.prompt_tokens)))
    if request.tools:
        yield _text("tools", _json(request.tools))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)


def _text(title: str, text: str) -> Text:
    return Text(title, text[:MAX_CHARS], len(text))


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHORT_CHARS else text[:MAX_SHORT_CHARS] + " ..."
