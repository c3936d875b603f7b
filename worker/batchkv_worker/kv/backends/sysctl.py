"""Numbers of the macOS kernel about memory, without starting a process for each."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

Read = Callable[[str], bytes]  # a name -> its value as the kernel stores it; raises OSError

PRESSURE_LEVEL = "kern.memorystatus_vm_pressure_level"
SWAP_USAGE = "vm.swapusage"
_LONGEST = 256  # bytes of a value


def read_sysctl(name: str, library: Any = None) -> bytes:
    """The value of a name as the kernel stores it; OSError when there is none."""
    if library is None:
        if sys.platform != "darwin":
            raise OSError("sysctlbyname is macOS's own")
        library = ctypes.CDLL(None, use_errno=True)
    value = ctypes.create_string_buffer(_LONGEST)
    size = ctypes.c_size_t(_LONGEST)
    if library.sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise OSError(ctypes.get_errno(), f"sysctl {name}")
    return value.raw[: size.value]


def pressure_level(read: Read) -> int:
    """1 normal, 2 warning, 4 critical. Raises OSError, ValueError."""
    return _unpacked("<i", read(PRESSURE_LEVEL))[0]


def swap_used(read: Read) -> int:
    """Bytes that are swapped out (``struct xsw_usage``). Raises OSError, ValueError."""
    _total, _available, used = _unpacked("<QQQ", read(SWAP_USAGE))
    return used


def _unpacked(layout: str, value: bytes) -> tuple[int, ...]:
    size = struct.calcsize(layout)
    if len(value) < size:
        raise ValueError(f"the kernel's answer has {len(value)} bytes of {size}")
    return struct.unpack(layout, value[:size])
