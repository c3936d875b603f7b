"""An engine without MLX, and a worker class that runs it: ``rq worker -w support.fake_engine...``.

What a row does is in its prompt: any text is echoed, after ``plan.steps`` steps. Its other choices
have their number after it. The words
``slow:N`` (N steps), ``reject:CODE``, ``crash`` (the step raises), ``device fault`` (it raises what
Metal does), ``hang`` (the step never ends; also ``hang in C`` and ``hang with the interpreter``)
and ``die`` (the process ends at once) do what they say. The plan of a worker in another process
comes from the variable FAKE_PLAN, which the product does not know.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redis import Redis

from batchkv_producer.wire.choice import Choice
from batchkv_producer.wire.job import Usage
from batchkv_producer.wire.maker import Maker
from batchkv_worker.errors import ModelError
from batchkv_worker.events import Completed, Event, Piece, Rejected, Work
from batchkv_worker.figures.engine import EngineFigures, Progress
from batchkv_worker.model.load_progress import report
from batchkv_worker.queue.pause import Pause, PowerWatch
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings

CHUNK_TOKENS = 512  # of prompts, in one step


@dataclass(frozen=True, slots=True)
class FakePlan:
    """How the fake engine behaves. Seconds are slept, so other threads run."""

    steps: int = 1
    step_seconds: float = 0.0
    prompt_token_seconds: float = 0.0  # then a step computes a chunk of prompts at most
    step_tokens: int = 0  # that a row gets by a step; 0: two tokens in all
    load_seconds: float = 0.0
    loading: str = ""  # what it says of itself meanwhile
    load_error: str = ""
    broken: str = ""  # MODEL:FILE, which cannot be loaded until there is such a file
    answer: str = ""  # instead of the echo
    fingerprint: str = ""  # of the model that it says it has
    scheme: str = "affine8"
    changed: str = ""  # a file: once it is there, the model on the disk is another
    trouble: str = ""  # why it says that it computes less than it could
    tally: str = ""  # a file that is told, at each step, how many rows have ended
    platform: str = ""  # of the worker's power source and of caffeinate; else this system's
    power_poll_seconds: float = PowerWatch.POLL_SECONDS
    grace_seconds: float = Pause.GRACE_SECONDS


@dataclass(slots=True)
class _Row:
    work: Work
    steps_left: int
    num_steps: int
    num_prompt: int  # tokens to compute
    num_said: int = 0
    prompt_left: int = field(init=False)  # tokens that are not computed

    def __post_init__(self) -> None:
        self.prompt_left = self.num_prompt


class FakeEngine:
    """Slots and a waiting list, as the real one has; one step moves every row in a slot."""

    def __init__(
        self, slots: int, prefetch: int, plan: FakePlan, adapters: Sequence[str] = ()
    ) -> None:
        report(plan.loading)
        time.sleep(plan.load_seconds)
        if plan.load_error == "crash":
            raise RuntimeError("the loader broke")
        if plan.load_error:
            raise ModelError(plan.load_error)
        self._slots = slots
        self._plan = plan
        self.num_slots, self.max_in_flight = slots, slots + prefetch
        self.maker = Maker(plan.fingerprint, plan.scheme, "float32")
        self.adapter, self.served = "", [""]
        self.makers = {"": self.maker}
        for name in adapters:
            weights = f"{plan.fingerprint}-{name}" if plan.fingerprint else ""
            self.makers[name] = Maker(weights, plan.scheme, "float32")
        self._waiting: deque[_Row] = deque()
        self._decoding: list[_Row] = []
        self.seen: list[str] = []
        self._num_ended = 0
        self._num_prompt = self._num_answer = 0
        self.busy_seconds = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._decoding

    def serve(self, adapter: str) -> None:
        assert self.is_idle
        self.adapter, self.maker = adapter, self.makers[adapter]
        self.served.append(adapter)

    def add(self, work: Work) -> None:
        self.seen.append(work.job_id)
        text = prompt_of(work)
        steps = int(text.partition("slow:")[2].split()[0]) if "slow:" in text else self._plan.steps
        self._waiting.append(_Row(work, steps, steps, self.prompt_tokens(work)))

    def prompt_tokens(self, work: Work) -> int:
        """How many of a row's prompt it computes."""
        return len(prompt_of(work)) // 4

    def cancel(self, job_id: str) -> None:
        self._waiting = deque(row for row in self._waiting if row.work.job_id != job_id)
        self._decoding = [row for row in self._decoding if row.work.job_id != job_id]

    def recall(self, job_ids: Sequence[str], count: int) -> list[str]:
        waiting = [row for row in self._waiting if not self._is_begun(row)]
        found = [row.work.job_id for row in reversed(waiting) if row.work.job_id in job_ids]
        for job_id in found[:count]:
            self.cancel(job_id)
        return found[:count]

    def step(self) -> list[Event]:
        num_prompt = self._num_prompt
        self.fill_slots()
        seconds = self._plan.prompt_token_seconds * (self._num_prompt - num_prompt)
        if self._decoding or not self._plan.prompt_token_seconds:
            seconds += self._plan.step_seconds
        if seconds:
            self.compute(seconds)
            self.busy_seconds += seconds
        self._num_answer += self._plan.step_tokens * len(self._decoding)
        for row in self._decoding:
            row.steps_left -= 1
        ended = [row for row in self._decoding if row.steps_left <= 0]
        self._decoding = [row for row in self._decoding if row.steps_left > 0]
        if self._plan.tally and ended:
            self._num_ended += len(ended)
            Path(self._plan.tally).write_text(str(self._num_ended))
        live = [row for row in self._decoding if row.work.is_live and row.steps_left > 0]
        pieces: list[Event] = [
            Piece(row.work.job_id, piece) for row in live if (piece := _piece(row))
        ]
        ends = [self._end(row) for row in ended]
        completed = (end for end in ends if isinstance(end, Completed))
        if not self._plan.step_tokens:
            self._num_answer += sum(end.usage.completion for end in completed)
        return pieces + ends

    def compute(self, seconds: float) -> None:
        """Computing takes so long."""
        time.sleep(seconds)

    def fill_slots(self) -> None:
        left = CHUNK_TOKENS if self._plan.prompt_token_seconds else sys.maxsize
        while left > 0 and self._waiting and len(self._decoding) < self._slots:
            row = self._waiting[0]
            num_tokens = min(left, row.prompt_left)
            row.prompt_left -= num_tokens
            left -= num_tokens
            self._num_prompt += num_tokens
            if not row.prompt_left:
                self._decoding.append(self._waiting.popleft())

    def _is_begun(self, row: _Row) -> bool:
        return row.prompt_left < row.num_prompt

    def figures(self) -> EngineFigures:
        now = self.progress()
        levels = {"rows.waiting": now.num_waiting, "rows.prefill": now.num_prefill}
        levels["rows.decode"] = now.num_decode
        counts = {"computed.prompt": now.num_prompt, "computed.answer": now.num_generated}
        return EngineFigures(counts, levels)

    def progress(self) -> Progress:
        num_waiting, num_decode = len(self._waiting), len(self._decoding)
        num_prefill = sum(self._is_begun(row) for row in list(self._waiting)[:1])
        num_waiting -= num_prefill
        return Progress(num_waiting, num_prefill, num_decode, self._num_prompt, self._num_answer)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass

    def trouble(self) -> str:
        return self._plan.trouble

    def has_changed(self) -> bool:
        return bool(self._plan.changed) and Path(self._plan.changed).exists()

    def memory_bytes(self) -> int:
        return 3_100_000_000

    def report(self) -> str:
        return f"{len(self._waiting)} rows wait, {len(self._decoding)} rows decode"

    def _end(self, row: _Row) -> Event:
        work, text = row.work, prompt_of(row.work)
        match text.split(":")[0]:
            case "reject":
                return Rejected(work.job_id, text.split(":")[1], "rejected as asked")
            case "crash":
                raise RuntimeError("crashed as asked")
            case "device fault":
                raise RuntimeError(
                    "[METAL] Command buffer execution failed: Innocent Victim "
                    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
                )
            case "hang":
                threading.Event().wait()
            case "hang in C":  # ctypes lets go of the interpreter around the call
                ctypes.CDLL(None).pause()
            case "hang with the interpreter":
                ctypes.PyDLL(None).pause()
            case "die":
                os._exit(9)
        completion = self._plan.step_tokens * row.num_steps or 2 * work.num_wanted
        usage = Usage(prompt=len(text), completion=completion, cached=1)
        word = f"echo of {self.adapter}" if self.adapter else "echo"
        answer = self._plan.answer or f"{word} {text}"
        more = tuple(Choice(f"{answer} #{number}", "stop") for number in range(1, work.num_wanted))
        return Completed(work.job_id, answer, "stop", usage, more=more)


def _piece(row: _Row) -> str:
    """One character of the echo for each step but the last."""
    text = f"echo {prompt_of(row.work)}"
    row.num_said += 1
    return text[row.num_said - 1 : row.num_said]


def prompt_of(work: Work) -> str:
    """The prompt, or the last message's content."""
    request = work.request
    return request.prompt or str((request.messages or [{"content": ""}])[-1]["content"])


def rows_of(settings: WorkerSettings) -> tuple[int, int]:
    """Slots, and rows that wait beside them; ``auto`` slots are 32 here."""
    slots = settings.slots or 32
    return slots, settings.rows_ahead(slots)


def build_fake(settings: WorkerSettings, plan: FakePlan) -> FakeEngine:
    """The factory's form of FakeEngine."""
    model, _, file = plan.broken.partition(":")
    if model == settings.model and not Path(file).exists():
        raise ModelError(f"{model} is broken")
    return FakeEngine(*rows_of(settings), plan, [one.name for one in settings.adapters])


class FakeWorker(BatchWorker):
    """BatchWorker on a fake engine, for ``rq worker -w support.fake_engine.FakeWorker``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        plan = _plan()
        if plan.platform:
            self.platform = plan.platform
        PowerWatch.POLL_SECONDS = plan.power_poll_seconds
        Pause.GRACE_SECONDS = plan.grace_seconds

    @staticmethod
    def engine_factory(settings: WorkerSettings) -> FakeEngine:
        return build_fake(settings, _plan())


def _plan() -> FakePlan:
    return replace(FakePlan(), **json.loads(os.environ.get("FAKE_PLAN", "{}")))


def worker_here(connection: Redis, model: str, **plan: Any) -> BatchWorker:
    """A worker of this process on a fake engine with this plan."""

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            return FakeEngine(*rows_of(settings), FakePlan(**plan))

    settings = WorkerSettings(model=model)
    return Worker(list(settings.queues), None, connection=connection, settings=settings)


def main() -> None:
    """``batchkv worker`` on the fake engine: ``python -m support.fake_engine -m fake``."""
    from batchkv_worker import cli
    from batchkv_worker.queue import rq_worker

    rq_worker.BatchWorker = FakeWorker  # type: ignore[misc]
    cli.worker_command()


if __name__ == "__main__":
    main()
