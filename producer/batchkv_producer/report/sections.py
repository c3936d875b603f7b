"""The sections of a report: one function makes the HTML of each, from the facts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from batchkv_producer.monitor.workers import COMPARED_SECONDS
from batchkv_producer.progress import duration
from batchkv_producer.report.charts import (
    Column,
    Line,
    Part,
    bar_chart,
    column_chart,
    data_table,
    legend,
    share_chart,
    step_curve,
    time_chart,
)
from batchkv_producer.report.facts import (
    COMPUTED,
    MEMORY,
    STORE,
    Bin,
    Distribution,
    Facts,
    FailureGroup,
    Source,
    WorkerShare,
)
from batchkv_producer.report.words import (
    per_cent,
    safe,
    seconds_text,
    short_number,
    span_text,
    utc,
)

MAX_BARS = 24  # of workers in a chart; the table has all
MOST_ACTIVE = 0.9  # of the time from first row to last: else the rest is told apart

Rate = Callable[[Bin], float]


def summary(facts: Facts) -> str:
    """The sums, as ``status`` has them, and what follows from them."""
    status = facts.status
    figures = [
        ("rows", f"{status.total:,}", ""),
        ("ok", f"{status.ok:,}", "good"),
        ("failed", f"{status.failed:,}", "bad" if status.failed else ""),
        ("canceled", f"{status.canceled:,}", ""),
        *([("ok, reused", f"{status.reused:,}", "")] if status.reused else ()),
        ("open", f"{status.total - status.num_ended:,}", ""),
        ("prompt tokens", f"{status.prompt_tokens:,}", ""),
        ("of them cached", per_cent(status.cached_tokens, status.prompt_tokens), ""),
        ("generated tokens", f"{status.completion_tokens:,}", ""),
    ]
    if facts.started_at is not None and facts.ended_at is not None:
        seconds = max(facts.ended_at - facts.started_at, 0.001)
        figures.append(("from first row to last", seconds_text(1000 * seconds), ""))
        # Rows of a retry may begin long after the others have ended: nobody computed in between.
        if facts.active_seconds < MOST_ACTIVE * seconds:
            active = seconds_text(1000 * facts.active_seconds)
            figures.append(("of it with rows under way", active, ""))
        figures.append(("generated tokens a second", f"{facts.tokens_per_second:,.1f}", ""))
    if status.saved_ms:
        figures.append(("saved by the cache", seconds_text(status.saved_ms), ""))
    tiles = "".join(
        f'<div class="{kind}"><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>'
        for name, value, kind in figures
    )
    return (
        f'<section><h2>Sums</h2><dl class="tiles">{tiles}</dl>'
        f'<p class="sum">{safe(status.whole_sum())}</p>{_notes(facts)}</section>'
    )


def _notes(facts: Facts) -> str:
    """Sentences about rows that the charts do not show."""
    status = facts.status
    sentences = []
    if facts.num_copies:
        sentences.append(
            f"{facts.num_copies:,} rows have the answer of another row. They were not computed, so"
            " they are in the sums only."
        )
    if facts.num_unreadable:
        sentences.append(
            f"{facts.num_unreadable:,} results cannot be read: batchkv did not write them."
        )
    if status.is_done and facts.num_read + facts.num_unreadable < status.num_ended:
        missing = status.num_ended - facts.num_read - facts.num_unreadable
        sentences.append(
            f"{missing:,} rows ended while the results were read. They are in the sums only."
        )
    return "".join(f'<p class="note">{safe(sentence)}</p>' for sentence in sentences)


def over_time(facts: Facts) -> str:
    """Tokens and rows over time."""
    bins = facts.throughput.bins
    if not bins:
        return _section("Over time", _nothing("No row has run yet."))
    about = f"Each value is the mean of {span_text(facts.throughput.width_seconds)}."
    cards = [
        _rates(
            facts,
            "Generated tokens a second",
            f"{about} A row's tokens are spread over the time that it ran.",
            [("generated", lambda one: one.completion_tokens)],
        ),
        _rates(
            facts,
            "Prompt tokens a second",
            f"{about} Cached tokens were not computed.",
            [
                ("all", lambda one: one.prompt_tokens),
                ("computed", lambda one: one.prompt_tokens - one.cached_tokens),
            ],
        ),
        _rates(
            facts,
            "Ended rows a minute",
            f"{about} A row counts when it ended.",
            [
                ("ok", lambda one: 60.0 * one.ok),
                ("failed or canceled", lambda one: 60.0 * (one.failed + one.canceled)),
            ],
        ),
    ]
    return _section("Over time", f'<div class="cards">{"".join(cards)}</div>')


def _rates(facts: Facts, title: str, about: str, rates: Sequence[tuple[str, Rate]]) -> str:
    """A chart of counts in each bin, by its seconds."""
    bins = facts.throughput.bins
    lines = [
        Line(name, step_curve(_stretch(one, facts, rate(one) / one.seconds) for one in bins))
        for name, rate in rates
    ]
    names = [name for name, _ in rates]
    rows = [
        [utc(one.at), *(short_number(rate(one) / one.seconds) for _, rate in rates)] for one in bins
    ]
    unit = title.rpartition(" a ")[2]
    chart = time_chart(title, about, f"a {unit}", lines)
    table = data_table(title, ["from (UTC)", *names], rows)
    return _card(title, about, (legend(names) if len(names) > 1 else "") + chart, table)


def _stretch(one: Bin, facts: Facts, value: float) -> tuple[float, float, float]:
    """When a bin begins and ends, as far as the batch ran, and its value."""
    begin = max(one.at, facts.started_at or one.at)
    return begin, begin + one.seconds, value


def distributions(facts: Facts) -> str:
    """How long rows took, and how long prompts and answers were."""
    cards = [
        _distribution("Time of a row", "From admission to the end, of the ok rows.", "time",
                      facts.latency_ms, seconds_text),
        _distribution("Length of prompts", "Of the ok rows.", "tokens", facts.prompt_length,
                      short_number),
        _distribution("Length of answers", f"Of the ok rows. {_endings(facts)}", "tokens",
                      facts.answer_length, short_number),
    ]  # fmt: skip
    if not any(cards):
        return _section("Distributions", _nothing("No row is ok yet."))
    return _section("Distributions", f'<div class="cards">{"".join(cards)}</div>')


def _endings(facts: Facts) -> str:
    shares = ", ".join(f"{count:,} {reason}" for reason, count in facts.endings)
    return f"They ended by: {shares}." if shares else ""


def _distribution(
    title: str, about: str, unit: str, found: Distribution | None, text: Callable[[float], str]
) -> str:
    if found is None:
        return ""
    columns = [Column(text(bar.low), text(bar.high), bar.count) for bar in found.bars]
    points = [("median", found.p50), ("90 %", found.p90), ("99 %", found.p99)]
    points += [("least", found.smallest), ("most", found.largest)]
    words = ", ".join(f"{name} {text(value)}" for name, value in points)
    words += f", mean {text(found.mean)}"
    rows = [[f"{column.low} to {column.high}", f"{column.value:,.0f}"] for column in columns]
    table = data_table(title, [unit, "rows"], rows)
    chart = column_chart(title, words, unit, columns)
    return _card(title, about, f'<p class="figures">{safe(words)}</p>{chart}', table)


def sources(facts: Facts) -> str:
    """Where the prompts' tokens came from."""
    title = "Cached share by tier"
    if not facts.sources:
        return _section(title, _nothing("No prompt was computed yet."))
    total = sum(source.tokens for source in facts.sources)
    names = [_source_name(one) for one in facts.sources]
    pairs = list(zip(names, facts.sources, strict=True))
    parts = [Part(name, one.tokens, f"{one.tokens:,}") for name, one in pairs]
    words = ", ".join(f"{name} {per_cent(one.tokens, total)}" for name, one in pairs)
    about = (
        "Prompt tokens by where they came from. Computed ones were in no cache. Tokens of a tier "
        "are divided by the blocks that came from it."
    )
    rows = [[name, f"{one.tokens:,}", per_cent(one.tokens, total)] for name, one in pairs]
    table = data_table(title, ["source", "prompt tokens", "share"], rows)
    return _section(title, _card("", about, share_chart(title, words, parts), table))


def _source_name(source: Source) -> str:
    names = {COMPUTED: "computed", MEMORY: "worker's memory", STORE: "shared cache, tier unknown"}
    return names.get(source.name, f"tier {source.name}")


def workers(facts: Facts) -> str:
    """Each worker's part, and who is slow."""
    title = "Workers"
    if not facts.workers:
        return _section(title, _nothing("No worker has ended a row yet."))
    shown = [one for one in facts.workers if one.completion_tokens][:MAX_BARS]
    bars = [
        Part(one.name, one.tokens_per_second, f"{one.tokens_per_second:,.1f} tokens/s")
        for one in sorted(shown, key=lambda one: -one.tokens_per_second)
    ]
    words = ", ".join(f"{bar.name} {bar.label}" for bar in bars)
    about = (
        "Generated tokens a second, of the time in which a worker had rows of this batch. The "
        "version is known of workers that still run."
    )
    all_tokens = sum(one.completion_tokens for one in facts.workers)
    titles = ["worker", "tokens/s", "of the fastest", "ok", "failed", "canceled",
              "generated tokens", "share", "prompt tokens", "cached", "active", "median time",
              "KV scheme", "version"]  # fmt: skip
    rows = [
        [one.name, f"{one.tokens_per_second:,.1f}",
         per_cent(one.relative_speed, 1.0) if one.is_comparable else "-",
         f"{one.ok:,}", f"{one.failed:,}", f"{one.canceled:,}", f"{one.completion_tokens:,}",
         per_cent(one.completion_tokens, all_tokens), f"{one.prompt_tokens:,}",
         per_cent(one.cached_tokens, one.prompt_tokens), duration(one.active_seconds),
         seconds_text(one.p50_ms) if one.ok else "-", one.scheme, one.version]
        for one in facts.workers
    ]  # fmt: skip
    about += _slowest(shown)
    chart = bar_chart("Speed of each worker", words, bars) if bars else ""
    card = _card("", about, chart, "")
    return _section(title, card + data_table("Each worker's part", titles, rows))


def _slowest(workers: Sequence[WorkerShare]) -> str:
    """A sentence on the slowest worker, of those that had rows long enough to tell."""
    long = [one for one in workers if one.is_comparable]
    short = [one.name for one in workers if not one.is_comparable]
    found = ""
    if len(long) > 1:
        slow, fast = (choose(long, key=_speed) for choose in (min, max))
        if slow.tokens_per_second < fast.tokens_per_second:
            share = per_cent(slow.tokens_per_second, fast.tokens_per_second)
            found = f" The slowest, {slow.name}, has {share} of the speed of {fast.name}."
    if short and len(workers) > 1:
        found += (
            f" Rows of {', '.join(short)} took less than {COMPARED_SECONDS:.0f} s, which is too "
        )
        found += "short to compare."
    return found


def _speed(worker: WorkerShare) -> float:
    return worker.tokens_per_second


def failures(facts: Facts) -> str:
    """Failed rows by code, with lines and messages."""
    if not facts.failures:
        return _section("Failures", _nothing("No row has failed."))
    blocks = "".join(map(_failure, facts.failures))
    return _section("Failures", blocks)


def _failure(group: FailureGroup) -> str:
    """One code, with its first lines and some of its messages."""
    items = "".join(
        f'<li>line {one.line}: <span dir="auto">{safe(one.message or "no message")}</span></li>'
        for one in group.examples
    )
    return (
        f'<article class="failure"><h3><code>{safe(group.code)}</code>: {_rows(group.count)}</h3>'
        f"<p>{_lines(group.lines, group.count)}</p><ul>{items}</ul></article>"
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _lines(lines: Sequence[int], count: int) -> str:
    more = f" and {count - len(lines):,} more" if count > len(lines) else ""
    shown = ", ".join(map(str, lines))
    return f"Line{'' if count == 1 else 's'} {shown}{more}"


def settings(facts: Facts) -> str:
    """Settings and versions."""
    rows = [[one.name, one.value] for one in facts.settings]
    table = data_table("Settings of the batch", ["setting", "value"], rows, num_texts=2)
    return _section("Settings and versions", table)


def all_sections(facts: Facts) -> Iterator[str]:
    """All sections of a report, from top to bottom."""
    for make in (summary, failures, workers, over_time, distributions, sources, settings):
        yield make(facts)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{safe(title)}</h2>{content}</section>"


def _card(title: str, about: str, chart: str, table: str) -> str:
    head = f"<h3>{safe(title)}</h3>" if title else ""
    numbers = f"<details><summary>Numbers</summary>{table}</details>" if table else ""
    return f'<div class="card">{head}<p class="about">{safe(about)}</p>{chart}{numbers}</div>'


def _nothing(sentence: str) -> str:
    return f'<p class="note">{safe(sentence)}</p>'
