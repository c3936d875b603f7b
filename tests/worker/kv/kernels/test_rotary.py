"""The kernel for norms and positions, compiled for a CPU, gives what MLX's operations give."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from batchkv_worker.kv.backends.compare import difference
from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.launch import Constant, Run
from batchkv_worker.kv.kernels.rotary import MOST_SIZE, ROTARY, RotaryKernel, Turn
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")

Pair = tuple[mx.array, mx.array]
OFFSETS = (0, 7, 400, 3_001)
EPSILONS = (1e-6, 1e-2)
MOST = {mx.float32: 2e-4, mx.bfloat16: 0.02}  # of the largest number; angles are rounded, too

FAULTS = (
    ("sum += SHUFFLE_XOR(sum, other)", "sum += FAULT(0) * 0.1f + SHUFFLE_XOR(sum, other)"),
    (
        "x * cosines[at] - y * sines[at]",
        "x * cosines[at] - y * (FAULT(1) ? -sines[at] : sines[at])",
    ),
    ("float(offsets[row] + token)", "float(offsets[FAULT(2) ? 0 : row] + token)"),
    ("float(weights[other])", "float(weights[FAULT(3) ? one : other])"),
    ("AS_FLOAT(KEY_EPS)", "AS_FLOAT(FAULT(4) ? QUERY_EPS : KEY_EPS)"),
    ("pair + TURNED : 2 * pair + 2) * step", "pair + TURNED - FAULT(5) : 2 * pair + 2) * step"),
    ("place - QUERY_HEADS;", "place - QUERY_HEADS - FAULT(6) * (place > QUERY_HEADS);"),
    ("frequencies[pair]", "frequencies[FAULT(7) ? 0 : pair]"),
    ("0 : row] + token)", "0 : row] + token * !FAULT(8))"),  # as the third left it
    ("token * int64_t(queries_strides[1])", "token * int64_t(queries_strides[2 - !FAULT(9)])"),
    ("token * int64_t(keys_strides[1])", "token * int64_t(keys_strides[2 - !FAULT(10)])"),
    (
        "(QUERY_HEADS) + head) * GROUPS_Z + token",
        "(QUERY_HEADS) + head) * GROUPS_Z + token * !FAULT(11)",
    ),
    (
        "(KEY_HEADS) + head) * GROUPS_Z + token",
        "(KEY_HEADS) + head) * GROUPS_Z + token * !FAULT(12)",
    ),
    ("number * GROUPS_X * SIMDS", "number * (GROUPS_X * SIMDS + FAULT(13))"),
    ("is_query ? query_weights", "is_query && !FAULT(14) ? query_weights"),
    ("is_apart ? low[1] : high[0]", "is_apart && !FAULT(15) ? low[1] : high[0]"),
    ("< QUERY_HEADS + KEY_HEADS", "< QUERY_HEADS + KEY_HEADS - FAULT(16)"),
)
PLAIN = Turn(64, 32, False, EPSILONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rotary")


def both(
    turn: Turn,
    launch: CppLaunch,
    dtype: mx.Dtype = mx.float32,
    tokens: int = 1,
    heads: tuple[int, int] = (6, 2),
) -> tuple[Pair, Pair]:
    """What operations give and what the kernel gives, for queries and keys that are views."""
    mx.random.seed(turn.size)
    rows, (num_heads, kv_heads) = len(OFFSETS), heads
    norms = [nn.RMSNorm(turn.size, epsilon) for epsilon in turn.epsilons]
    for norm in norms:
        norm.weight = mx.random.uniform(0.5, 1.5, (turn.size,)).astype(dtype)
    rope = nn.RoPE(2 * turn.turned, traditional=turn.neighbours, base=1e4)
    whole = 0.2 * mx.random.normal((rows, tokens, (num_heads + kv_heads) * turn.size)).astype(dtype)
    parts = mx.split(whole, [num_heads * turn.size], axis=-1)
    queries, keys = (part.reshape(rows, tokens, -1, turn.size) for part in parts)
    offsets = mx.array(OFFSETS, mx.int32)
    wanted = [
        rope(norm(x).transpose(0, 2, 1, 3), offset=offsets)
        for norm, x in zip(norms, (queries, keys), strict=True)
    ]
    pairs = mx.arange(turn.turned)
    given = (norms[0].weight, norms[1].weight), 1e4 ** (-pairs / turn.turned), offsets
    return (wanted[0], wanted[1]), RotaryKernel(launch)(turn, queries, keys, *given)


@pytest.mark.few(5)
@pytest.mark.parametrize(("dtype", "tokens"), [(mx.float32, 1), (mx.bfloat16, 1), (mx.float32, 5)])
@pytest.mark.parametrize(
    "turn",
    [
        PLAIN,
        Turn(128, 64, False, EPSILONS),
        Turn(80, 20, False, EPSILONS),
        Turn(96, 48, True, EPSILONS),
        Turn(256, 32, True, EPSILONS),
    ],
)
def test_results_are_those_of_operations(
    turn: Turn, dtype: mx.Dtype, tokens: int, folder: Path
) -> None:
    """Heads of any size, turned as a whole or in part, in either order of pairs; of each token."""
    launch = CppLaunch(folder)
    for wanted, found in zip(*both(turn, launch, dtype, tokens), strict=True):
        assert found.shape == wanted.shape and found.dtype == dtype
        assert difference(wanted, found) <= MOST[dtype]
    assert launch.counts == {ROTARY.name: 1}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "turn", [PLAIN, Turn(80, 20, False, EPSILONS), Turn(66, 33, True, EPSILONS)]
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_other_ways_to_read_give_the_same(turn: Turn, dtype: mx.Dtype, folder: Path) -> None:
    """One by one, where a dialect does not read words; and for as many heads as models have."""
    narrow, wide = CppLaunch(folder, (("READS_WIDE", "0"),), 0), CppLaunch(folder)
    for heads in ((6, 2), (32, 8), (70, 2)):
        given = {"dtype": dtype, "tokens": 3, "heads": heads}
        wanted, found = both(turn, narrow, **given)
        assert max(map(difference, wanted, found)) <= MOST[dtype]
        pairs = zip(found, both(turn, wide, **given)[1], strict=True)
        most = 1e-5 if dtype == mx.float32 else MOST[dtype]  # sums are added in another order
        assert all(difference(*pair) <= most for pair in pairs)


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_planted_faults_are_seen(fault: int, folder: Path) -> None:
    for planted in (None, fault):
        launch = CppLaunch(folder, FAULTS, planted)
        wanted, found = both(PLAIN, launch, tokens=3, heads=(14, 4))
        worst = max(map(difference, wanted, found))
        assert (worst <= MOST[mx.float32]) == (planted is None)


def test_few_rows_of_many_tokens_have_a_kernel_of_their_own(folder: Path) -> None:
    """Metal binds arrays of few numbers apart, as positions of few rows are."""
    seen: list[int] = []

    def noting(body: Body, constants: tuple[Constant, ...]) -> Run:
        seen.append(int(dict(constants)["FEW_ROWS"]))  # type: ignore[call-overload]
        return CppLaunch(folder)(body, constants)

    kernel = RotaryKernel(noting)
    for rows in (4, 9):
        x, weight = mx.ones((rows, 5, 2, 64)), mx.ones((64,))
        kernel(PLAIN, x, x, (weight, weight), mx.ones((32,)), mx.zeros((rows,), mx.int32))
    assert seen == [1, 0]


@pytest.mark.parametrize(
    ("size", "turned"), [(65, 16), (64, 33), (64, 0), (MOST_SIZE + 2, MOST_SIZE // 2)]
)
def test_there_is_no_kernel_for_other_heads(size: int, turned: int) -> None:
    with pytest.raises(ValueError, match=f"turns {turned} pairs of {size}"):
        Turn(size, turned, False, EPSILONS)
