"""Which models fit into a machine's memory together. Pure.

The models are put into groups in the order in which they were named. A host holds models of one
group at a time, each in a process of its own, so that ending a process surely gives its memory
back. The memory of a process cannot change later. So each model of a group gets an equal share of
what its group leaves for keys and values, whether the others are held or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends.memory_budget import (
    LEAST_BYTES,
    USEFUL_BYTES,
    MemoryFacts,
    MemoryPlan,
    ModelFacts,
    cuda_pool_limit,
    plan_memory,
    pool_limit,
)
from batchkv_worker.model.footprint import Machine

# Bytes of the dense copy of one layer for each byte of packed keys and values. The true share is
# known once a model is loaded: it is smaller for all models of more than 20 layers.
DENSE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Group:
    """Models that fit together. ``memory_bytes``: for keys and values of each. None: it is chosen
    when the model is loaded, because the model has the machine alone. ``weights``: whether those of
    all are unpacked; "" where each worker decides."""

    models: tuple[str, ...]
    memory_bytes: int | None = None
    weights: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of each worker of these models."""
        memory = ("--memory", str(self.memory_bytes)) if self.memory_bytes else ()
        return (*memory, "--weights", self.weights) if self.weights else memory

    def __str__(self) -> str:
        words = " and ".join(self.models)
        return f"{words} (weights {self.weights})" if self.weights else words


Sizes = Mapping[str, int | None]


def sizes_as_asked(machine: Machine, weights: str) -> tuple[Sizes, Sizes | None]:
    """The first and the last argument of ``plan_groups`` under a setting of ``--weights``."""
    if machine.unpacked is None or weights == "packed":
        return machine.weights, None
    if weights == "auto":
        return machine.weights, machine.unpacked
    return {one: machine.unpacked[one] or size for one, size in machine.weights.items()}, None


def plan_groups(
    weights: Mapping[str, int | None],
    facts: MemoryFacts,
    wanted: int | None = None,
    unpacked: Mapping[str, int | None] | None = None,
) -> tuple[Group, ...]:
    """The groups of these models. Raises ModelError for a model that does not fit alone.

    ``weights``: model -> bytes of its weights in memory, in the order of the command; None for a
    model that is not on this machine yet. Such a model gets the machine alone. ``wanted``: bytes
    for keys and values of all models together (``--memory``). ``unpacked``: bytes of the weights
    where workers unpack them, None for a model of which they are not known; None if nothing is
    unpacked.
    """
    found: list[tuple[str, ...]] = []
    for model, size in weights.items():
        if size is None:
            found.append((model,))
            continue
        _check_alone(model, size, facts, wanted)
        for place, group in enumerate(found):
            sizes = [weights[each] for each in group]
            known = [each for each in sizes if each is not None]
            if len(known) == len(sizes) and _share([*known, size], facts, wanted) is not None:
                found[place] = (*group, model)
                break
        else:
            found.append((model,))
    return tuple(_group(models, weights, facts, wanted, unpacked) for models in found)


def _group(
    models: tuple[str, ...],
    weights: Mapping[str, int | None],
    facts: MemoryFacts,
    wanted: int | None,
    unpacked: Mapping[str, int | None] | None,
) -> Group:
    if len(models) == 1:
        return Group(models, wanted)
    share = _share([weights[model] or 0 for model in models], facts, wanted)
    assert share is not None
    if unpacked is None or all(unpacked[model] == weights[model] for model in models):
        return Group(models, share)
    # Each of the processes would reckon with itself alone, and what the others leave just then.
    sizes = [size for model in models if (size := unpacked[model]) is not None]
    has_room = len(sizes) == len(models) and sum(sizes) <= facts.recommended // 2
    lesser = _share(sizes, facts, wanted) if has_room else None
    if lesser is None or (wanted is not None and lesser < share):
        return Group(models, share, "packed")
    return Group(models, lesser, "unpacked")


def _share(sizes: Sequence[int], facts: MemoryFacts, wanted: int | None) -> int | None:
    """Bytes for keys and values of each of these models together. None if they do not fit."""
    plan = _plan(sizes, facts)
    least = LEAST_BYTES
    if wanted is None and facts.kind == "metal":
        least = USEFUL_BYTES
    # Without a limit of its own, a plan with a problem has less than it takes to be of use.
    is_crowded = bool(plan.problem) and (wanted is None or plan.kv_bytes < wanted)
    share = min(plan.kv_bytes, wanted or plan.kv_bytes) // len(sizes)
    return None if is_crowded or plan.is_hopeless or share < least else share


def _plan(sizes: Sequence[int], facts: MemoryFacts) -> MemoryPlan:
    """The memory of several processes, each with a pool of its own."""
    limits = {"metal": pool_limit(facts.ram), "cuda": cuda_pool_limit(facts.recommended)}
    pools = (len(sizes) - 1) * limits.get(facts.kind, 0)
    share = DENSE_SHARE if facts.kind == "metal" else 0.0
    return plan_memory(facts, ModelFacts(sum(sizes) + pools, share))


def _check_alone(model: str, size: int, facts: MemoryFacts, wanted: int | None) -> None:
    plan = _plan([size], facts)
    if (plan.is_hopeless and not wanted) or size >= facts.ram:
        raise ModelError(
            f"model {model!r} is too large for this machine, even alone: its weights take "
            f"{size / 2**30:.1f} GB of {facts.ram / 2**30:.1f} GB. Leave out this -m, or use one "
            "of 4 bits"
        )
