"""Which model a host loads next, and when it changes. Pure: times are monotonic seconds.

- It serves a model until its queue is empty and no row of it is under way. Somebody who got an
  answer at once in the last minute counts as work.
- Then it changes to a model that is **wanted**: rows of it wait, and nobody else holds it. A model
  that others hold is wanted, too, if its rows then end sooner, by more than loading takes. How
  long they last is measured at their present speed. While another host still loads the model,
  that is not known, so nobody follows it for a few rows.
- Models of one group are loaded beside each other, without a change.
- A model stays for a while after it was loaded, before another one takes its place.
- If all rows of a queue are for other workers, its queue counts as empty for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIVE_ROWS = 1_000_000  # somebody who waits for an answer counts as many rows of a batch


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue of a model, as one host sees it.

    ``rank``: of the most urgent rows, an index of ``redis_keys.PRIORITIES``. ``num_live``: answers
    that somebody waits for. ``is_asked``: somebody got an answer at once in the last minute.
    ``num_holders``: workers, other than this host's own, that serve it or are about to.
    ``seconds_left``: until it is empty at their speed; None while that is not known.
    """

    num_rows: int = 0
    rank: int = 1
    num_live: int = 0
    is_asked: bool = False
    num_holders: int = 0
    seconds_left: float | None = None

    @property
    def has_work(self) -> bool:
        """Whether anything waits."""
        return self.num_rows > 0 or self.num_live > 0


@dataclass(frozen=True, slots=True)
class Held:
    """A model that this host holds. ``since``: when it was loaded, or loading began."""

    since: float
    is_ready: bool = False
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Load ``model``. ``ends``: models whose processes end before."""

    model: str
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """What never changes: groups of models that fit together, and the shortest stay in seconds.

    ``is_eager``: load a model also when no rows wait, so that it is ready when some come.
    """

    groups: Sequence[Sequence[str]]
    stay_seconds: float
    is_eager: bool = True


def choose(
    rules: Rules,
    held: Mapping[str, Held],
    queues: Mapping[str, Queue],
    load_seconds: Mapping[str, float],
    now: float,
) -> Choice | None:
    """The model to load now; None to go on as before.

    ``queues`` lacks the models that this host may not load for now. ``load_seconds``: how long
    loading takes here, measured or guessed.
    """
    if not held:
        return _first(rules, queues)
    group = next(each for each in rules.groups if set(held) <= set(each))
    wanted = [
        model
        for model, queue in queues.items()
        if model not in held and _is_wanted(queue, load_seconds[model])
    ]
    if beside := [model for model in wanted if model in group]:
        return Choice(_best(beside, queues))
    if not wanted or not _may_leave(held, queues):
        return None
    if now - max(each.since for each in held.values()) < rules.stay_seconds:
        return None
    return Choice(_best(wanted, queues), tuple(held))


def _first(rules: Rules, queues: Mapping[str, Queue]) -> Choice | None:
    """The first model of a host that holds none: the one with most to do for one more worker."""
    if waiting := [model for model, queue in queues.items() if queue.has_work]:
        return Choice(_best(waiting, queues))
    if not queues or not rules.is_eager:
        return None
    return Choice(min(queues, key=lambda model: queues[model].num_holders))


def _is_wanted(queue: Queue, load_seconds: float) -> bool:
    if not queue.has_work:
        return False
    if queue.num_holders == 0:
        return True
    if queue.seconds_left is None:
        return False
    # While this host loads, the others go on; then there is one more, as fast as each of them.
    saved = (queue.seconds_left - load_seconds) / (queue.num_holders + 1)
    return saved > load_seconds


def _may_leave(held: Mapping[str, Held], queues: Mapping[str, Queue]) -> bool:
    """Whether nothing is left to do for the models that are held."""
    for model, each in held.items():
        queue = queues.get(model, Queue())
        if not each.is_ready or each.is_busy or queue.has_work or queue.is_asked:
            return False
    return True


def _best(models: Sequence[str], queues: Mapping[str, Queue]) -> str:
    """Unserved models come first, then urgent rows, then the most rows for each holder."""

    def key(model: str) -> tuple[bool, bool, int, float]:
        queue = queues[model]
        num_rows = queue.num_rows + LIVE_ROWS * queue.num_live
        is_served = queue.num_holders > 0
        return is_served, not queue.num_live, queue.rank, -num_rows / (queue.num_holders + 1)

    return min(models, key=key)
