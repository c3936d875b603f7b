"""What errors of MLX mean, read from their messages: memory ran out, or the device failed.

MLX raises ``RuntimeError`` for both. Nothing but the text tells them apart. On Metal the text
contains what the system says of a command buffer, such as::

    [METAL] Command buffer execution failed: Impacting Interactivity
    (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)

A *device fault* is an error that says nothing about the rows that were computed: macOS ended a
command buffer because it took long while a display was on, because another program's work had
failed, or because earlier work of ours had. The same rows may be computed again.
"""

from __future__ import annotations

# Parts of the messages, in lower case: MLX's allocators, Metal's command buffers, CUDA's runtime.
_OUT_OF_MEMORY = (
    "unable to allocate",
    "attempting to allocate",
    "insufficient memory",
    "out of memory",
    "outofmemory",
    "resource limit",
)
_DEVICE_FAULT = (
    "callbackerrortimeout",
    "gpu timeout error",
    "callbackerrorhang",
    "gpu hang error",
    "impacting interactivity",
    "impactinginteractivity",
    "innocent victim",
    "innocentvictim",
    "victim of gpu error",
    "prior/excessive gpu errors",
    "submissionsignored",
    "launch timed out",
)

WORKAROUNDS = (
    "On a Mac, macOS may end long work of the GPU while a display is on. Let the display sleep, or "
    "start the worker with AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 in its environment"
)


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an exception of MLX says that an allocation failed."""
    text = str(fault).lower()
    return isinstance(fault, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)


def is_at_once(fault: BaseException) -> bool:
    """Whether the allocation itself raised it, not the device later."""
    return isinstance(fault, MemoryError) or "allocat" in str(fault).lower()


def is_device_fault(fault: BaseException) -> bool:
    """Whether an exception of MLX says that the device failed, for no reason of the rows."""
    if not isinstance(fault, RuntimeError) or is_out_of_memory(fault):
        return False
    text = str(fault).lower()
    return any(sign in text for sign in _DEVICE_FAULT)


def graver(fault: Exception, other: Exception | None) -> Exception:
    """Of two exceptions of one step, the one to recover from: a failed device ends more."""
    return other if other is not None and is_device_fault(other) else fault


def is_late(fault: BaseException) -> bool:
    """Whether an exception of MLX reports that work failed which was given to the device before."""
    is_short = isinstance(fault, RuntimeError) and is_out_of_memory(fault)
    return is_device_fault(fault) or (is_short and not is_at_once(fault))
