"""How much memory keys and values get, as a function of facts. No MLX, nothing is read here.

Metal shares its memory with macOS and every other program. It does not refuse an allocation that
is too large: macOS compresses memory and swaps, and a step takes seconds. So the budget leaves room
for all the others, and for what MLX itself takes beside weights, keys and values. CUDA has memory
of its own and refuses. On a CPU half of the machine's memory is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cpu", "metal", "cuda"]

GIB = 2**30
LEAST_BYTES = 64 * 2**20  # for keys and values, however little is left
USEFUL_BYTES = GIB  # below this, few rows fit at once
_RESERVE = 0.1  # of what a device recommends, for activations
_LEAST_FOR_SYSTEM = 3 * GIB  # macOS and its programs on a small Mac; a fifth of a large one
_LAYERS_IN_FLIGHT = 3  # whose dense copies of packed keys and values exist at once
_ADVICE = "a smaller model or one of 4 bits, a smaller --kv-scheme, fewer --slots, or set --memory"


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes of a machine and of what else uses its memory, before a model is loaded.

    ``recommended``: the most that MLX should use, as the device says (on a CPU, half of ``ram``).
    ``wired``: what macOS and other programs hold that cannot be swapped. ``hub``: the limits of the
    hub's servers on this machine. ``tier``: the limit of this worker's cache tier in memory.
    ``swap``: what is swapped out.
    """

    kind: Kind
    ram: int
    recommended: int
    wired: int = 0
    hub: int = 0
    tier: int = 0
    swap: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``weights`` in bytes. ``dense_share``: bytes of the dense copy of one packed layer for each
    byte of keys and values that are kept; 0 where nothing is packed."""

    weights: int
    dense_share: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``kv_bytes`` for keys and values, and how they come about, all in bytes.

    ``problem``: a few sentences if little is left, with the reason; else empty.
    ``is_hopeless``: the weights alone take what the device recommends.
    """

    kv_bytes: int
    total: int  # that this worker may take
    system: int = 0  # left to macOS and other programs
    others: int = 0  # left to the hub's servers, and to the cache tier in memory
    pool: int = 0  # that MLX keeps of freed memory
    copies: int = 0  # of dense keys and values
    problem: str = ""
    is_hopeless: bool = False


def pool_limit(ram: int) -> int:
    """Bytes of freed memory that MLX may keep on Metal, to use them again."""
    return max(GIB // 2, min(ram // 16, 4 * GIB))


def cuda_pool_limit(free: int) -> int:
    """The same on CUDA, of the bytes that other programs leave ``free``.

    MLX's own limit is nearly all of the device. On an H200, 4, 8 and 16 GB were as fast.
    """
    return max(GIB, min(free // 16, 8 * GIB))


def plan_memory(facts: MemoryFacts, model: ModelFacts) -> MemoryPlan:
    """The budget for keys and values on this machine with this model."""
    total = int(facts.recommended * (1 - _RESERVE))
    if facts.kind != "metal":
        left = total - model.weights
        problem = _problem(facts, model, left, 0, left) if left < LEAST_BYTES else ""
        return MemoryPlan(max(LEAST_BYTES, left), total, problem=problem)
    pool = pool_limit(facts.ram)
    usual = max(_LEAST_FOR_SYSTEM, facts.ram // 5)
    # About half of the usual share is wired by macOS itself. More is another program's.
    system = usual + max(0, facts.wired - usual // 2)
    others = facts.hub + facts.tier
    alone = _without_copies(min(total, facts.ram - usual) - pool - model.weights, model)
    total = min(total, facts.ram - system - others)
    left = _without_copies(total - pool - model.weights, model)
    kv_bytes, problem = left, ""
    # Half of all that the device recommends beside the weights: without it no row would fit.
    tight = _without_copies((facts.recommended - model.weights) // 2, model)
    if left < USEFUL_BYTES:
        # Servers and other programs may use less than they might. A few rows go on beside them.
        kv_bytes = max(LEAST_BYTES, min(USEFUL_BYTES, max(alone, tight)))
        problem = _problem(facts, model, left, pool, kv_bytes, system)
    copies = int(kv_bytes * _LAYERS_IN_FLIGHT * model.dense_share)
    is_hopeless = tight < LEAST_BYTES
    return MemoryPlan(kv_bytes, total, system, others, pool, copies, problem, is_hopeless)


def _without_copies(num_bytes: int, model: ModelFacts) -> int:
    """What is left for keys and values when the dense copies of some layers come out of it."""
    return max(0, int(num_bytes / (1 + _LAYERS_IN_FLIGHT * model.dense_share)))


def _problem(
    facts: MemoryFacts, model: ModelFacts, left: int, pool: int, used: int, system: int = 0
) -> str:
    taken = [f"the model's weights take {_gb(model.weights)}"]
    if system:
        taken.append(f"macOS and other programs get {_gb(system)}")
    if facts.hub:
        taken.append(f"the hub's servers on this Mac may take {_gb(facts.hub)} (maxmemory)")
    if facts.tier:
        taken.append(f"the cache's memory tier may take {_gb(facts.tier)}")
    if pool:
        taken.append(f"MLX keeps up to {_gb(pool)} of freed memory")
    if facts.swap > facts.ram // 8:
        taken.append(f"{_gb(facts.swap)} are swapped out already")
    lower = ", or lower the maxmemory of the hub's servers" if facts.hub else ""
    return (
        f"{_gb(max(0, left))} of {_gb(facts.ram)} are left for keys and values. The device "
        f"recommends {_gb(facts.recommended)} for MLX; {'; '.join(taken)}. Keys and values get "
        f"{_gb(max(LEAST_BYTES, used))}, which is little. Use {_ADVICE}{lower}"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.0f} MB"
