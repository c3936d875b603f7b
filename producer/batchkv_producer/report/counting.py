"""Counts the rows of a batch, one by one, into the facts of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.report.facts import (
    COMPUTED,
    MEMORY,
    NO_WORKER,
    OTHER_WORKERS,
    STORE,
    Example,
    Facts,
    FailureGroup,
    Setting,
    Source,
    WorkerShare,
)
from batchkv_producer.report.sketches import Histogram, Timeline
from batchkv_producer.wire.job import Result

MAX_BINS = 256
MAX_WORKER_BINS = 960  # the finer they are, the better is a worker's active time known
MAX_WORKERS = 64
MAX_CODES = 64
MAX_LINES = 20
MAX_EXAMPLES = 3
MAX_MESSAGE_CHARS = 300
MAX_NAME_CHARS = 200
OTHER_CODES = "other codes"
DAY_SECONDS = 86_400


@dataclass(slots=True)
class _Worker:
    """Sums of one worker."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: list[int] = field(default_factory=lambda: [0, 0, 0])
    timeline: Timeline = field(default_factory=lambda: Timeline(MAX_WORKER_BINS))
    latency: Histogram = field(default_factory=Histogram)
    scheme: str = ""

    def share(self, name: str, version: str) -> WorkerShare:
        """Its part of the batch. The relative speed is filled in later."""
        counts = self.outcomes
        # A row's end is stored in whole seconds, so short work is measured by its longest row.
        seconds = max(self.timeline.active_seconds, self.latency.largest / 1000)
        return WorkerShare(
            name=name,
            ok=counts["ok"],
            failed=counts["failed"],
            canceled=counts["canceled"],
            prompt_tokens=self.tokens[0],
            cached_tokens=self.tokens[1],
            completion_tokens=self.tokens[2],
            active_seconds=seconds,
            tokens_per_second=self.tokens[2] / seconds if seconds else 0.0,
            relative_speed=0.0,
            p50_ms=self.latency.median,
            scheme=self.scheme,
            version=version,
        )


@dataclass(slots=True)
class _Failures:
    """Rows of one error code."""

    count: int = 0
    lines: list[int] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)  # message -> its first line

    def add(self, line: int, message: str) -> None:
        self.count += 1
        if len(self.lines) < MAX_LINES:
            self.lines.append(line)
        text = _shortened(" ".join(message.split()), MAX_MESSAGE_CHARS)
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.setdefault(text, line)

    def group(self, code: str) -> FailureGroup:
        examples = tuple(Example(line, text) for text, line in self.examples.items())
        return FailureGroup(code, self.count, tuple(self.lines), examples)


class Counting:
    """Sums over the rows of a batch.

    ``created`` is the batch's time and ``now`` the server's, in seconds since 1970. Rows that did
    not end in between, by the wrong clock of a worker, have no place in the work over time.
    """

    def __init__(self, created: float, now: float) -> None:
        self._earliest, self._latest = created - DAY_SECONDS, now + DAY_SECONDS
        self.num_read = self.num_copies = self.num_unreadable = 0
        self._timeline = Timeline(MAX_BINS)
        self._latency, self._prompts, self._answers = Histogram(), Histogram(), Histogram()
        self._sources: Counter[str] = Counter()
        self._workers: dict[str, _Worker] = {}
        self._failures: dict[str, _Failures] = {}
        self._endings: Counter[str] = Counter()

    def add(self, line: int, result: Result, *, is_copy: bool) -> None:
        """Count a row. ``is_copy``: it has the answer of another row, so nothing was computed."""
        self.num_read += 1
        if result.outcome == "failed":
            code, message = result.error or ("unknown", "")
            self._failures_of(code).add(line, message)
        if is_copy:
            self.num_copies += 1
            return
        usage = result.usage
        tokens = (usage.prompt, usage.cached, usage.completion)
        worker = self._worker_of(result)
        worker.outcomes[result.outcome] += 1
        worker.tokens = [one + more for one, more in zip(worker.tokens, tokens, strict=True)]
        if self._earliest <= result.created <= self._latest:
            start = result.created - result.busy_ms / 1000
            for timeline in (self._timeline, worker.timeline):
                timeline.add(start, result.created, result.outcome, tokens)
        if result.outcome == "ok":
            worker.latency.add(result.busy_ms)
            self._latency.add(result.busy_ms)
            self._prompts.add(usage.prompt)
            self._answers.add(usage.completion)
            self._endings[_shortened(result.finish_reason, MAX_NAME_CHARS) or "unknown"] += 1
            self._count_sources(result)

    def facts(
        self,
        status: BatchStatus,
        versions: Mapping[str, str],
        settings: Sequence[tuple[str, str]],
    ) -> Facts:
        """The facts. ``versions`` are those of workers that live, by name."""
        throughput = self._timeline.throughput()
        has_run = bool(throughput.bins)
        return Facts(
            status=status,
            num_read=self.num_read,
            num_copies=self.num_copies,
            num_unreadable=self.num_unreadable,
            started_at=self._timeline.first if has_run else None,
            ended_at=self._timeline.last if has_run else None,
            throughput=throughput,
            latency_ms=self._latency.distribution(),
            prompt_length=self._prompts.distribution(),
            answer_length=self._answers.distribution(),
            sources=self._all_sources(),
            workers=self._shares(versions),
            failures=self._groups(),
            endings=tuple(self._endings.most_common()),
            settings=tuple(Setting(name, value) for name, value in settings),
            active_seconds=self._timeline.active_seconds,
        )

    def _worker_of(self, result: Result) -> _Worker:
        name = _shortened(result.worker, MAX_NAME_CHARS) or NO_WORKER
        if name not in self._workers and len(self._workers) >= MAX_WORKERS:
            name = OTHER_WORKERS
        worker = self._workers.setdefault(name, _Worker())
        worker.scheme = worker.scheme or _shortened(result.scheme, MAX_NAME_CHARS)
        return worker

    def _failures_of(self, code: str) -> _Failures:
        code = _shortened(code, MAX_NAME_CHARS)
        if code not in self._failures and len(self._failures) >= MAX_CODES:
            code = OTHER_CODES
        return self._failures.setdefault(code, _Failures())

    def _count_sources(self, result: Result) -> None:
        """Divide the prompt's tokens by where they came from."""
        cached, note = result.usage.cached, result.note
        in_memory = cached
        self._sources[COMPUTED] += result.usage.prompt - cached
        by_tier: dict[str, int] = {}
        if note is not None and note.found:
            by_tier = dict(note.tiers) or {STORE: note.found}
        num_blocks = sum(by_tier.values()) + (note.local if note is not None else 0)
        for name, num in by_tier.items():
            share = cached * num // num_blocks
            self._sources[_shortened(name, MAX_NAME_CHARS)] += share
            in_memory -= share
        self._sources[MEMORY] += in_memory

    def _all_sources(self) -> tuple[Source, ...]:
        """The sources: computed tokens first, then the worker's memory, then the tiers."""
        tiers = sorted(self._sources.keys() - {COMPUTED, MEMORY})
        named = (COMPUTED, MEMORY, *tiers)
        return tuple(Source(name, self._sources[name]) for name in named if self._sources[name])

    def _shares(self, versions: Mapping[str, str]) -> tuple[WorkerShare, ...]:
        """All workers, those with the most generated tokens first."""
        shares = [
            worker.share(name, versions.get(name, "")) for name, worker in self._workers.items()
        ]
        compared = [share.tokens_per_second for share in shares if share.is_comparable]
        fastest = max(compared, default=0.0)
        for place, share in enumerate(shares):
            if share.is_comparable and fastest:
                relative = share.tokens_per_second / fastest
                shares[place] = replace(share, relative_speed=relative)
        return tuple(sorted(shares, key=lambda share: (-share.completion_tokens, share.name)))

    def _groups(self) -> tuple[FailureGroup, ...]:
        groups = [failures.group(code) for code, failures in self._failures.items()]
        return tuple(sorted(groups, key=lambda group: (-group.count, group.code)))


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."
