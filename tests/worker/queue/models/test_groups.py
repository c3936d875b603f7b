"""Which models fit into memory together."""

from __future__ import annotations

import pytest

from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends.memory_budget import MemoryFacts
from batchkv_worker.model.footprint import Machine
from batchkv_worker.queue.models.groups import Group, plan_groups, sizes_as_asked
from batchkv_worker.queue.models.start import words_of

GIB = 2**30
STUDIO = MemoryFacts("metal", 64 * GIB, 48 * GIB, wired=3 * GIB)
AIR = MemoryFacts("metal", 16 * GIB, 11 * GIB, wired=3 * GIB)
LINUX = MemoryFacts("cpu", 16 * GIB, 8 * GIB)
GPU = MemoryFacts("cuda", 128 * GIB, 80 * GIB)


def test_models_fit_together_on_a_large_mac_and_not_on_a_small_one() -> None:
    """Two models of 4 GB: a Studio holds both, an Air one at a time."""
    weights = {"a": 4 * GIB, "b": 4 * GIB}
    (group,) = plan_groups(weights, STUDIO)
    assert group.models == ("a", "b")
    assert group.memory_bytes is not None
    assert 2 * group.memory_bytes < 48 * GIB - 8 * GIB
    assert [each.models for each in plan_groups(weights, AIR)] == [("a",), ("b",)]
    assert plan_groups(weights, AIR)[0].memory_bytes is None


def test_a_model_joins_the_first_group_in_which_it_fits() -> None:
    """A large model gets the machine alone; the small ones beside it share another group."""
    weights = {"a": 2 * GIB, "large": 34 * GIB, "b": 3 * GIB}
    assert [each.models for each in plan_groups(weights, STUDIO)] == [("a", "b"), ("large",)]


def test_the_log_says_whether_models_take_turns() -> None:
    """Those of one group are in memory together; groups are there one at a time."""
    both = Group(("a", "b"), 10)
    assert words_of([both]).startswith("its models fit into memory together: a and b")
    found = words_of([both, Group(("c",), None)])
    assert found.startswith("its models take turns in memory: a and b") and ", or c" in found


def test_a_model_that_is_not_here_yet_gets_the_machine_alone() -> None:
    """Its size is not known."""
    assert [each.models for each in plan_groups({"a": GIB, "b": None}, STUDIO)] == [("a",), ("b",)]


def test_the_memory_that_was_asked_for_is_shared() -> None:
    """``--memory`` is of all models together; a share must be of use."""
    weights = {"a": GIB, "b": GIB}
    assert plan_groups(weights, LINUX, GIB) == (Group(("a", "b"), GIB // 2),)
    small = 100 * 2**20
    assert plan_groups(weights, LINUX, small) == (Group(("a",), small), Group(("b",), small))


def test_a_model_that_does_not_fit_alone_is_refused() -> None:
    """The error names the model and both sizes."""
    with pytest.raises(ModelError, match=r"'large' is too large .* 30.0 GB of 16.0 GB"):
        plan_groups({"a": GIB, "large": 30 * GIB}, AIR)


def test_models_of_one_gpu_are_unpacked_together_or_not_at_all() -> None:
    """Half of the memory is for the weights of all. A worker alone would reckon with its own."""
    weights, room = {"a": 3 * GIB, "b": 8 * GIB}, {"a": 10 * GIB, "b": 30 * GIB}
    (dense,) = plan_groups(weights, GPU, None, room)
    assert dense.models == ("a", "b") and str(dense) == "a and b (weights unpacked)"
    assert dense.flags == ("--memory", str(dense.memory_bytes), "--weights", "unpacked")
    (packed,) = plan_groups(weights, GPU, None, room | {"b": 30 * GIB + 1})
    (told,) = plan_groups(weights, GPU)
    assert packed == Group(told.models, told.memory_bytes, "packed")
    assert packed.memory_bytes is not None and dense.memory_bytes is not None
    assert packed.memory_bytes > dense.memory_bytes + 12 * GIB
    assert packed.flags[2:] == ("--weights", "packed")


def test_a_model_that_has_a_gpu_alone_decides_by_itself() -> None:
    weights = {"a": 3 * GIB, "large": 70 * GIB}
    groups = plan_groups(weights, GPU, None, {"a": 10 * GIB, "large": 200 * GIB})
    assert [group.flags for group in groups] == [(), ()]


def test_models_whose_unpacked_size_is_not_known_stay_packed() -> None:
    """The workers would unpack them, whatever they take. Dense models need no flag."""
    weights = {"a": 6 * GIB, "b": 6 * GIB}
    (group,) = plan_groups(weights, GPU, None, {"a": 10 * GIB, "b": None})
    assert group.weights == "packed"
    (group,) = plan_groups(weights, GPU, None, weights)
    assert group == plan_groups(weights, GPU)[0] and not group.weights


def test_the_memory_that_was_asked_for_comes_before_unpacking() -> None:
    weights, room = {"a": 3 * GIB, "b": 8 * GIB}, {"a": 10 * GIB, "b": 30 * GIB}
    for wanted, how in ((50 * GIB, "packed"), (20 * GIB, "unpacked")):
        (group,) = plan_groups(weights, GPU, wanted, room)
        assert (group.memory_bytes, group.weights) == (wanted // 2, how)


def test_sizes_are_those_of_the_setting() -> None:
    weights, room = {"a": 3, "b": 8}, {"a": 10, "b": None}
    machine = Machine(dict(weights), dict(room), GPU)
    assert sizes_as_asked(machine, "auto") == (weights, room)
    assert sizes_as_asked(machine, "packed") == (weights, None)
    assert sizes_as_asked(machine, "unpacked") == ({"a": 10, "b": 8}, None)
    assert sizes_as_asked(machine._replace(unpacked=None), "auto") == (weights, None)
