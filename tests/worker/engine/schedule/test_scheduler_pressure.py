"""The scheduler and the layouts under a small budget, without tensors: random loads to their end.

The engine's work with arrays is replayed here with numbers: rows join, step, leave and come
back by the layouts' own rules.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest

from batchkv_worker.engine.schedule import scheduler as scheduler_module
from batchkv_worker.engine.schedule.admission import FEWEST_OUTPUTS, Budget, OutputLengths
from batchkv_worker.engine.schedule.scheduler import MAX_PREEMPTIONS, Scheduler
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.growth import NoRoom, fits
from batchkv_worker.kv.slots.layouts import Costs, SlotLayouts
from batchkv_worker.sequence import Generation, Sequence
from parity.few import RUNS_ALL

COSTS = (
    Costs(4, largest=2),
    Costs(1, {300: 3}),
    Costs(2, {}, 900, largest=1),
    Costs(0, {64: 2}, 50),
)


class Play:
    """An engine of numbers: ``lengths`` is how long each row's answer really is."""

    def __init__(self, rng: random.Random, costs: Costs, is_optimistic: bool) -> None:
        self.rng, self.slots = rng, rng.choice([1, 3, 8, 16, 16])
        self.layouts = SlotLayouts(self.slots, costs.per_window)
        worst = Budget(256, 0, costs)
        demand = Demand(400, 900)
        alone = SlotLayouts(1, costs.per_window).bytes_needed(costs, [demand])
        memory = int((alone + worst.prefill_bytes([demand])) * rng.uniform(1.0, 4.0))
        self.scheduler = Scheduler(
            self.layouts, Budget(256, memory, costs), is_optimistic=is_optimistic
        )
        self.rows: dict[int, Sequence] = {}
        self.lengths: dict[str, int] = {}
        self.learns = rng.random() < 0.3  # else it goes on to expect short answers
        self.groups: list[list[str]] = []  # the rows of each that was computed
        self.num_ended = 0
        self.num_preempted = 0

    def add(self, number: int) -> None:
        length = self.rng.choice([1, 30, 200, 400])
        row = Sequence(str(number), [1] * (length + 1), Generation(self.rng.choice([5, 100, 900])))
        most = row.generation.max_tokens
        self.lengths[row.job_id] = self.rng.choice([1, most, self.rng.randint(1, most)])
        self.scheduler.add(row)

    def step(self) -> None:
        group = self.scheduler.next_group()
        if group is not None:
            group.advance(min(group.width, group.position + 256))
            self.check()
            if group.is_computed:
                self.join()
        self.make_room()
        if self.rows:
            self.layouts.after_step()
        for slot, row in list(self.rows.items()):
            row.start_step()
            row.generated.append(1)
            if len(row.generated) == self.lengths[row.job_id]:
                if self.learns:
                    self.scheduler.output_lengths.add(len(row.generated))
                self.leave(slot)
                self.num_ended += 1
        self.layouts.check()
        self.check()

    def cells(self, demand: Demand | None = None, count: int | None = None) -> int | None:
        budget, memory = self.scheduler.budget, self.scheduler.memory
        left = budget.memory_bytes - memory.snapshot(self.scheduler.group).prefill
        extra = [] if demand is None else [demand]
        return self.layouts.max_cells(budget.costs, left, extra, count)

    def join(self) -> None:
        group = self.scheduler.group
        assert group is not None
        rows = self.scheduler.finish_group()
        self.groups.append([row.job_id for row in rows])
        for place, row in enumerate(rows):
            demand = Demand(row.num_prefill, row.num_remaining)
            cells = self.scheduler.memory.max_cells(group, demand)
            slot, move = self.layouts.make_way(demand)
            if move is not None:
                self.rows[move.target] = self.rows.pop(move.source)
            try:
                self.layouts.admit(demand, slot, None, cells)
            except NoRoom:
                self.set_back(rows[place:])
                return
            row.enter_slot(slot)
            self.rows[slot] = row

    def make_room(self) -> None:
        while self.rows:
            try:
                self.layouts.before_step(self.cells())
                return
            except NoRoom:
                pass
            main = self.layouts.main
            if main.rows > main.num_active:
                while (move := self.layouts.close_gap()) is not None:
                    self.rows[move.target] = self.rows.pop(move.source)
                self.layouts.shrink()
                continue
            slots = list(self.rows)
            self.rng.shuffle(slots)
            loose = [s for s in slots[1:] if self.rows[s].num_preempted < MAX_PREEMPTIONS]
            assert loose, "rows admitted by their worst case have room"
            left = dict(self.rows)
            for slot in loose:
                del left[slot]
                lengths = [main.length(other) for other in left]
                remaining = max(row.num_remaining for row in left.values())
                cells = self.cells(count=len(left))
                if cells is None or fits(lengths, remaining, cells):
                    break
            out = [slot for slot in slots if slot not in left]
            rows = [self.rows[slot] for slot in out]
            for slot in out:
                self.leave(slot)
            self.num_preempted += len(rows)
            self.set_back(rows)

    def set_back(self, rows: list[Sequence]) -> None:
        for row in rows:
            row.preempt()
        self.scheduler.requeue(rows)

    def leave(self, slot: int) -> None:
        self.layouts.release(slot)
        del self.rows[slot]

    def check(self) -> None:
        """No slot and no byte is lost, and the budget holds."""
        budget = self.scheduler.budget
        assert self.layouts.main.slots == set(self.rows)
        held = self.scheduler.memory.snapshot(self.scheduler.group)
        assert held.total <= budget.memory_bytes == held.allowed, (held, budget.memory_bytes)


# Loads of all costs, of 1 to 16 slots; in some of them rows leave and come back.
SEEDS = range(14) if RUNS_ALL else (2, 4, 5, 6, 7, 8, 9, 10, 12)


@pytest.mark.parametrize("is_optimistic", [True, False])
def test_every_row_ends_within_the_budget(is_optimistic: bool) -> None:
    """No row is lost, none starves or leaves too often, and bytes never exceed the budget."""
    num_preempted = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        play = Play(rng, rng.choice(COSTS), is_optimistic)
        if rng.random() < 0.7:
            for _ in range(FEWEST_OUTPUTS):
                play.scheduler.output_lengths.add(rng.choice([1, 20]))
        rows = rng.randrange(1, 60)
        for number in range(rows):
            play.add(number)
            if rng.random() < 0.3:
                play.step()
        for _ in range(60_000):
            if play.scheduler.is_idle:
                break
            play.step()
        assert play.scheduler.is_idle and play.num_ended == rows, seed
        assert not len(play.scheduler._uses) and not play.layouts.main.slots
        num_preempted += play.num_preempted
    assert (num_preempted > 2) == is_optimistic


def one_by_one(rows: list[Sequence], fits: Callable[[list[Sequence]], bool]) -> list[Sequence]:
    """What ``as_many_as_fit`` must return: the rows before the first that does not fit."""
    num = next((num for num in range(1, len(rows) + 1) if not fits(rows[:num])), len(rows) + 1)
    return rows[: num - 1]


def groups_of(seed: int, *, is_optimistic: bool) -> list[list[str]]:
    """The rows of all groups of one play, in their order. Answers end soon, for the next group."""
    rng = random.Random(seed)
    play = Play(rng, rng.choice(COSTS), is_optimistic)
    for _ in range(FEWEST_OUTPUTS):
        play.scheduler.output_lengths.add(rng.choice([1, 20]))
    for number in range(rng.randrange(20, 60)):
        play.add(number)
        play.lengths[str(number)] = min(play.lengths[str(number)], 60)
    while not play.scheduler.is_idle:
        play.step()
    return play.groups


@pytest.mark.parametrize("is_optimistic", [True, False])
def test_groups_are_those_of_rows_admitted_one_by_one(
    monkeypatch: pytest.MonkeyPatch, *, is_optimistic: bool
) -> None:
    """A row more never takes less memory, so that few questions give the same groups."""
    num_cut = 0  # groups that memory made smaller

    def counted(rows: list[Sequence], fits: Callable[[list[Sequence]], bool]) -> list[Sequence]:
        nonlocal num_cut
        found = one_by_one(rows, fits)
        num_cut += 0 < len(found) < len(rows)
        return found

    for seed in range(0 if RUNS_ALL else 5, 12):
        groups = groups_of(seed, is_optimistic=is_optimistic)
        monkeypatch.setattr(scheduler_module, "as_many_as_fit", counted)
        assert groups_of(seed, is_optimistic=is_optimistic) == groups, seed
        monkeypatch.undo()
    assert num_cut > 1


def test_what_most_answers_take() -> None:
    """Few answers give no estimate; of many, nine of ten need no more than is expected."""
    answers = OutputLengths()
    for length in range(1, FEWEST_OUTPUTS):
        answers.add(length)
        assert answers.expected is None
    for length in range(FEWEST_OUTPUTS, 101):
        answers.add(length)
    assert answers.expected == 90
    for _ in range(600):
        answers.add(7)
    assert answers.expected == 7


def test_set_back_rows_come_first_and_by_their_worst_case_in_the_end() -> None:
    """A row that had to leave goes before all others; after some times only if all of it fits."""
    scheduler = Scheduler(SlotLayouts(4), Budget(512, 3000, Costs(1)), is_optimistic=True)
    for _ in range(FEWEST_OUTPUTS):
        scheduler.output_lengths.add(1)
    for name in ("young", "old"):
        scheduler.add(Sequence(name, [1] * 201, Generation(1500)))
    scheduler.layouts.admit(Demand(200, 10), 0)
    young, _ = scheduler.waiting
    group = scheduler.next_group()
    assert group is not None and young in group.rows
    rows = scheduler.abandon_group()
    for row in rows:
        row.recompute(was_alone=False)
    scheduler.requeue(rows)
    assert next(iter(scheduler.waiting)) is young
    young.num_preempted = MAX_PREEMPTIONS
    assert scheduler.next_group() is None  # and nobody passes it
    scheduler.layouts.release(0)
    group = scheduler.next_group()
    assert group is not None and group.rows == [young]


def test_admission_needs_no_tensors() -> None:
    """Modules that decide import no MLX (their sources are checked, as tests share a process)."""
    for name in (
        "engine.schedule.admission",
        "engine.schedule.scheduler",
        "kv.slots.growth",
        "kv.slots.layout",
        "kv.slots.layouts",
    ):
        source = sys.modules[f"batchkv_worker.{name}"].__file__
        assert source is not None
        with open(source) as file:
            assert "mlx" not in file.read().lower().replace("tested without mlx", "")
