"""What messages of MLX mean. Each is as somebody saw it on Metal or CUDA."""

from __future__ import annotations

import pytest

from batchkv_worker.faults import is_device_fault, is_late, is_out_of_memory

METAL = "[METAL] Command buffer execution failed: "
CALLBACK = "kIOGPUCommandBufferCallbackError"

DEVICE = (
    f"{METAL}Caused GPU Timeout Error (00000002:{CALLBACK}Timeout)",
    f"{METAL}Caused GPU Hang Error (00000003:{CALLBACK}Hang)",
    f"{METAL}Ignored (for causing prior/excessive GPU errors) "
    f"(00000004:{CALLBACK}SubmissionsIgnored)",
    f"{METAL}Innocent Victim (00000005:{CALLBACK}InnocentVictim)",
    f"{METAL}Discarded (victim of GPU error/recovery) (00000005:{CALLBACK}InnocentVictim)",
    f"{METAL}Impacting Interactivity (0000000e: {CALLBACK}ImpactingInteractivity)",
    f"{METAL}Impacting Interactivity (0000000e:{CALLBACK}ImpactingInteractivity)",
    "cudaEventSynchronize(event) failed: the launch timed out and was terminated",
)
MEMORY = (
    "[malloc] Unable to allocate 68719476736 bytes.",
    "[metal::malloc] Attempting to allocate 9663676416 bytes which is greater than the maximum "
    "allowed buffer size of 8589934592 bytes.",
    f"{METAL}Insufficient Memory (00000008:{CALLBACK}OutOfMemory)",
    "cudaMallocAsync(&data, size, stream) failed: out of memory",
    "[metal::malloc] Resource limit (499000) exceeded.",
)
OTHER = (
    "[matmul] Last dimension of first input with shape (2,3) must match",
    f"{METAL}Caused GPU Address Fault Error (0000000b:{CALLBACK}PageFault)",
    "an illegal memory access was encountered",
)


@pytest.mark.parametrize("text", DEVICE)
def test_a_device_that_failed_is_recognized(text: str) -> None:
    """Such a fault says nothing of the rows, and is no shortage of memory."""
    fault = RuntimeError(text)
    assert is_device_fault(fault) and not is_out_of_memory(fault)


@pytest.mark.parametrize("text", MEMORY)
def test_a_shortage_of_memory_is_recognized(text: str) -> None:
    """Metal reports it as it reports a failed device; it is told apart by its words."""
    fault = RuntimeError(text)
    assert is_out_of_memory(fault) and not is_device_fault(fault)


@pytest.mark.parametrize("text", OTHER)
def test_a_fault_of_the_program_is_neither(text: str) -> None:
    """A wrong shape or a wrong address would come again: the engine ends, and rows are suspects."""
    fault = RuntimeError(text)
    assert not is_out_of_memory(fault) and not is_device_fault(fault)


def test_a_python_error_with_such_words_is_no_device_fault() -> None:
    """MLX raises RuntimeError. Anything else is a fault of the program."""
    assert not is_device_fault(ValueError(DEVICE[0]))


@pytest.mark.parametrize(
    ("text", "late"), [(DEVICE[0], True), (MEMORY[2], True), (MEMORY[0], False), (OTHER[0], False)]
)
def test_what_is_reported_of_earlier_work_is_told_from_what_is_refused(
    text: str, late: bool
) -> None:
    """An allocation that fails says nothing of what was computed before."""
    assert is_late(RuntimeError(text)) is late
