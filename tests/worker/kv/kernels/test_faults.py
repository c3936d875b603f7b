"""Faults planted in the kernels' sources are seen by the comparison with float32.

``FAULT(n)`` in a replacement is whether fault ``n`` is planted. So one program has them all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels.body import source_text
from worker.kv.kernels.cases import Case, Sample
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")

PLAIN = Case("affine8", "affine8/32", mx.float32, 64, 64, 4, 0, False, 4, 7)
MIXED = Case("turbo3", "affine5", mx.float32, 96, 64, 7, 2, True, 4, 8)
MATRIX = Case("affine8/32", "affine4", mx.float16, 64, 64, 4, 0, False, 4, 10)
SMALL = Case("nvfp4", "mxfp8", mx.float32, 64, 64, 2, 1, True, 3, 9)

# What is wrong, the case that shows it, the source's text, and its replacement.
FAULTS = [
    ("the last column is left out", PLAIN, "min(length - split", "min(length - FAULT(0) - split"),
    ("rows begin a column late", PLAIN, "= bounds[2 * row] +", "= bounds[2 * row] + FAULT(1) +"),
    ("a split has too few columns", PLAIN, "split * SPLIT;", "split * (SPLIT - FAULT(2));"),
    (
        *("values are read after the last column", PLAIN),
        "min((base + a * VALUE_COLUMNS) * step + own, last)",
        "min((base + a * VALUE_COLUMNS) * step + own, last + FAULT(3) * 40 * step)",
    ),
    (
        "columns after the last have weight",
        PLAIN,
        "column < count ?",
        "column < count + FAULT(4) ?",
    ),
    ("the keys' bias is left out", PLAIN, "if (KEY_BIAS)", "if (KEY_BIAS && !FAULT(5))"),
    ("the values' bias is left out", PLAIN, "if (VALUE_BIAS)", "if (VALUE_BIAS && !FAULT(6))"),
    (
        *("all values have the first group's scale", PLAIN),
        "(place * VALUE_EACH + piece * VALUE_PIECE) / VALUE_GROUP",
        "(FAULT(7) ? 0 : place * VALUE_EACH + piece * VALUE_PIECE) / VALUE_GROUP",
    ),
    (
        "half of a key is left out",
        PLAIN,
        "else if (other < KEY_LANES)",
        "else if (other < KEY_LANES >> FAULT(8))",
    ),
    ("lines are exchanged", PLAIN, "upper ? left : 0", "upper != FAULT(9) ? left : 0"),
    (
        *("scores are read before they are written", PLAIN),
        *("BARRIER;\nconstexpr int TURN", "if (!FAULT(10)) BARRIER;\nconstexpr int TURN"),
    ),
    (
        *("weights are read before they are written", PLAIN),
        "BARRIER;\n{\nconst int place = lane % VALUE_LANES",
        "if (!FAULT(11)) BARRIER;\n{\nconst int place = lane % VALUE_LANES",
    ),
    (
        *("weights are overwritten before they are read", PLAIN),
        *("BARRIER;\nUNROLL for (int line", "if (!FAULT(12)) BARRIER;\nUNROLL for (int line"),
    ),
    (
        *("sums are read before they are written", PLAIN),
        "BARRIER;\nconst int num_heads",
        "if (!FAULT(13)) BARRIER;\nconst int num_heads",
    ),
    ("one part's sum is left out", PLAIN, "other < PARTS;", "other < PARTS - FAULT(14);"),
    ("a split is not joined", PLAIN, "i < num_splits;", "i < num_splits - FAULT(15);"),
    (
        "splits are not weighed",
        PLAIN,
        "EXP2(SPLIT_TOP(i)",
        "EXP2((FAULT(16) ? 0 : SPLIT_TOP(i))",
    ),
    ("a code loses its upper bits", MIXED, "<< (32 - shift)", "<< (32 - shift) * !FAULT(17)"),
    ("a run loses its upper bits", MIXED, "(high << 1)", "(high << 1) * !FAULT(18)"),
    ("turbo's levels are not centred", MIXED, "* (-0.5f *", "* (FAULT(19) ? 0.0f : -0.5f *"),
    (
        "the sink has no weight",
        MIXED,
        "sum += EXP2(LOG2E * sinks",
        "sum += !FAULT(20) * EXP2(LOG2E * sinks",
    ),
    ("absent prefixes count", MIXED, "if (entry >= 0)", "if (entry >= 0 || FAULT(21))"),
    ("a chain's last prefix is left out", MIXED, "depth < DEPTH;", "depth < DEPTH - FAULT(22);"),
    (
        *("prefixes have scores of another base", MIXED),
        *("EXP2(PREFIX_SCORE(entry)", "EXP2((FAULT(23) ? 0.7f : 1.0f) * PREFIX_SCORE(entry)"),
    ),
    ("no float is negative", SMALL, "code & 128 ?", "code & 128 && !FAULT(24) ?"),
    ("small floats are too large", SMALL, "(120u << 23)", "((120u + FAULT(25)) << 23)"),
    ("a float of 4 bits is wrong", SMALL, "0xC8643210u", "(0xC8643210u + FAULT(26) * 0x1000)"),
    ("scales of other groups", SMALL, "8 * (group % 4)", "8 * (group % 4 ^ FAULT(27))"),
    (
        "columns of a matrix are exchanged",
        MATRIX,
        "(8 * half + of) * WORDS",
        "(8 * (half ^ FAULT(28)) + of) * WORDS",
    ),
    (
        "pairs are shifted",
        MATRIX,
        "second_of<KEY_BITS>(pair)",
        "second_of<KEY_BITS>(pair) - FAULT(29)",
    ),
    (
        "a product begins with the last one's",
        MATRIX,
        "k == 0 ? none",
        "k == 0 && !FAULT(30) ? none",
    ),
    (
        "weights are not transposed",
        MATRIX,
        "= TRANSPOSED(",
        "= (FAULT(31) ? [](uint32_t pair) { return pair; } : transposed)(",
    ),
    (
        "sums keep an old zero",
        MATRIX,
        "sum[tile][i] *= less",
        "sum[tile][i] *= FAULT(32) ? 1.0f : less",
    ),
    (
        "a column counts twice",
        MATRIX,
        "values[i / 2 * 2 + 1]",
        "values[i / 2 * 2 + 1 - FAULT(33)]",
    ),
    ("a nibble is lost", MATRIX, "i % 8 < 4 ? 0x5410", "i % 8 < 4 + FAULT(34) * 4 ? 0x5410"),
    (
        "other columns' bias is left out",
        MATRIX,
        "added_up(bias_total[tile][group][i])",
        "(FAULT(35) ? bias_total[tile][group][i] : added_up(bias_total[tile][group][i]))",
    ),
    (
        *("records are read before they are there", MATRIX),
        *("WAIT_FOR_COPIES(STAGES - 2)", "WAIT_FOR_COPIES(STAGES - 2 + FAULT(36))"),
    ),
    (
        *("others' copies are not waited for", MATRIX),
        *("SIMD_BARRIER;\nconst int free", "if (!FAULT(37)) SIMD_BARRIER;\nconst int free"),
    ),
    (
        "a copy overwrites what is read",
        MATRIX,
        "stage == 0 ? STAGES - 1 : stage - 1",
        "FAULT(38) ? stage : stage == 0 ? STAGES - 1 : stage - 1",
    ),
    (
        "columns after the last weigh",
        MATRIX,
        "score[tile][i] : NO_SCORE",
        "score[tile][i] : FAULT(39) ? 100.0f : NO_SCORE",
    ),
    (
        "records after the last are read",
        MATRIX,
        "i * COPY < num_words",
        "i * COPY < num_words || FAULT(40)",
    ),
    (
        "a nibble is 16 times too large",
        MATRIX,
        "VALUE_UNIT * times_across<VALUE_BITS>(own)",
        "VALUE_UNIT * (FAULT(41) ? 1.0f : times_across<VALUE_BITS>(own))",
    ),
    (
        "totals keep an old zero",
        MATRIX,
        "total[tile][group][k][i] *= less",
        "total[tile][group][k][i] *= FAULT(42) ? 1.0f : less",
    ),
    (
        "simdgroups are not weighed",
        MATRIX,
        "EXP2(ZERO_OF(part) - own_top)",
        "(FAULT(43) ? 1.0f : EXP2(ZERO_OF(part) - own_top))",
    ),
    (
        "the bias of a key has another size than its scale",
        MATRIX,
        "query_sum[tile][group][i] *= KEY_UNIT",
        "query_sum[tile][group][i] *= FAULT(44) ? 1.0f : KEY_UNIT",
    ),
    (
        "a weight has another column's scale",
        MATRIX,
        "value_scales[i / 2], group).scale",
        "value_scales[i / 2 ^ FAULT(45)], group).scale",
    ),
    (
        "a zero is that of another query head",
        MATRIX,
        "- zero[tile][i % 2]",
        "- zero[tile][i % 2 ^ FAULT(46)]",
    ),
    (
        "a query head has another's sum",
        MATRIX,
        "query_sum[tile][group][i % 2]",
        "query_sum[tile][group][i % 2 ^ FAULT(47)]",
    ),
]
CHANGES = tuple((text, other) for _, _, text, other in FAULTS)

# The same, where the last threadgroup joins the splits.
LAST_FAULTS = [
    ("another threadgroup joins", "*is_last == 0", "*is_last == FAULT(60)"),
    ("no threadgroup is the last", "max(num_splits, 1)", "max(num_splits, 1) + FAULT(61)"),
    ("rows without columns have none", "max(num_splits, 1)", "max(num_splits, 1 - FAULT(62))"),
    ("heads share a counter", "row * GROUPS_X + head,", "row * GROUPS_X + head * !FAULT(63),"),
    (
        *("splits of another head are read", "(row * int64_t(GROUPS_X) + head) * GROUPS_Y"),
        "(row * int64_t(GROUPS_X) + (head ^ FAULT(64))) * GROUPS_Y",
    ),
    ("a split is left out", "int(GROUPS_Y));", "int(GROUPS_Y) - FAULT(65));"),
    ("another one's sum is taken", "VALUE_SIZE + 1)\n", "VALUE_SIZE + 1 - FAULT(66))\n"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module", params=[PLAIN, MIXED, SMALL, MATRIX], ids=lambda case: case.keys)
def sample(request: pytest.FixtureRequest) -> Sample:
    """Rows of several splits; with matrices, of scores that grow by more than halves hold."""
    if request.param != MATRIX:
        return Sample.of(request.param, (513, 290, 31))
    found = Sample.of(request.param, (1100, 290, 31))
    return replace(found, queries=found.queries * 6)


def test_planted_faults_are_seen(sample: Sample, folder: Path) -> None:
    """Each of them, and none where none is planted."""
    launch, matrices = CppLaunch(folder, CHANGES), sample.case == MATRIX
    sample.check(launch, matrices=matrices)
    unseen = []
    for number, (what, case, *_) in enumerate(FAULTS):
        if case == sample.case:
            try:
                sample.check(replace(launch, fault=number), matrices=matrices)
                unseen.append(what)
            except (AssertionError, RuntimeError):
                continue
    assert not unseen


@pytest.mark.parametrize("is_backward", [False, True])
def test_faults_where_the_last_threadgroup_joins_are_seen(is_backward: bool, folder: Path) -> None:
    """Each of them in rows of none to three splits."""
    launch = CppLaunch(folder, is_backward=is_backward)
    sample = Sample.of(replace(MIXED, rows=4), (513, 290, 0, 31))
    sample.check(launch, counts=True)
    unseen = []
    for number, (what, text, other) in enumerate(LAST_FAULTS, 60):
        try:
            sample.check(replace(launch, faults=((text, other),), fault=number), counts=True)
            unseen.append(what)
        except (AssertionError, RuntimeError):
            continue
    assert not unseen


def test_each_fault_changes_a_source() -> None:
    """A fault whose text is in no source would be planted nowhere."""
    sources = [
        source_text(name)
        for name in ("common", "splits", "matrix_splits", "pairs", "finish", "merge", "join")
    ]
    for what, _, text, _ in FAULTS:
        assert any(text in source for source in sources), what
    for what, text, _ in LAST_FAULTS:
        assert source_text("last").count(text) == 1, what
