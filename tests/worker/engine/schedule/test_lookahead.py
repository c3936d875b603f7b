"""Only the oldest rows are looked at, and the queue has each of the others once."""

from __future__ import annotations

from batchkv_worker.engine.schedule.scheduler import LOOKAHEAD, Budget, Scheduler
from batchkv_worker.kv.slots.layouts import Costs, SlotLayouts
from batchkv_worker.sequence import Generation, Sequence


def test_the_last_row_that_is_looked_at_leaves_the_queue_when_it_is_chosen() -> None:
    """Every row waits or is in the group, exactly once, and those that wait keep their order."""
    plan = Scheduler(SlotLayouts(4), Budget(512, 10**9, Costs(1)))
    short = (0, LOOKAHEAD - 1, LOOKAHEAD)  # a chunk has no room for another one beside a short one
    names = [str(number) for number in range(LOOKAHEAD + 20)]
    for number, name in enumerate(names):
        length = 100 if number in short else 400
        plan.add(Sequence(name, [1] * (length + 1), Generation(10)))
    group = plan.next_group()
    assert group is not None
    chosen = [row.job_id for row in group.rows]
    assert chosen == ["0", str(LOOKAHEAD - 1)]
    assert [row.job_id for row in plan.waiting] == [name for name in names if name not in chosen]
