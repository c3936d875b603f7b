"""Workloads are the same on every machine."""

from __future__ import annotations

import pytest

from batchkv_worker.bench.workloads import WORKLOADS, Workload, make


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    """From a seed; every token is one of the vocabulary; every row generates something."""
    one, again = make(name, 9, 100), make(name, 9, 100)
    assert one == again and one.name == name
    assert len(one.prompts) == len(one.max_tokens) == 9
    assert all(0 <= token < 100 for prompt in one.prompts for token in prompt)
    assert min(one.max_tokens) > 0 and one.num_generated == sum(one.max_tokens)


def test_common_beginnings_count_once() -> None:
    """However the rows are ordered; a prompt that is the beginning of another adds nothing."""
    prompts = [[1, 2, 3, 4], [9, 9], [1, 2, 3, 5, 6], [1, 2], [9, 9]]
    assert Workload("x", prompts, [1] * 5).num_unique == 4 + 2 + 2
    shared = make("shared", 5)
    assert shared.num_unique == 768 + 5 * 40
