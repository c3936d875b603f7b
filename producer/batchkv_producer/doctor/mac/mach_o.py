"""Reads from the head of a Mach-O file for which macOS it was built.

Source of the format: ``mach-o/loader.h`` of Apple's cctools. A 64-bit file begins with a header of
32 bytes; load commands follow, each with its kind and its size. ``LC_BUILD_VERSION`` names platform
and lowest version; older files have ``LC_VERSION_MIN_MACOSX``.
"""

from __future__ import annotations

import struct

_MAGIC_64 = 0xFEEDFACF
_MAGIC_FAT = 0xCAFEBABE
_LC_BUILD_VERSION = 0x32
_LC_VERSION_MIN_MACOSX = 0x24
_PLATFORM_MACOS = 1
_CPU_ARM64 = 0x0100000C
_MAX_COMMANDS = 4096


def minimum_os(data: bytes) -> tuple[int, ...]:
    """The lowest macOS that the file runs on, such as (26, 2, 0); empty if it does not say."""
    try:
        return _minimum(data, _start_of_arm64(data))
    except struct.error:  # cut short, or something else
        return ()


def _start_of_arm64(data: bytes) -> int:
    """Where the part for Apple silicon begins in a file with several parts; else 0."""
    magic, num_parts = struct.unpack_from(">II", data)
    if magic != _MAGIC_FAT:
        return 0
    for index in range(min(num_parts, 8)):
        cpu, _, offset = struct.unpack_from(">III", data, 8 + 20 * index)
        if cpu == _CPU_ARM64:
            return int(offset)
    return 0


def _minimum(data: bytes, start: int) -> tuple[int, ...]:
    magic, _, _, _, num_commands = struct.unpack_from("<IIIII", data, start)
    if magic != _MAGIC_64:
        return ()
    place = start + 32
    for _ in range(min(num_commands, _MAX_COMMANDS)):
        kind, size = struct.unpack_from("<II", data, place)
        if size < 8:
            return ()
        if kind == _LC_BUILD_VERSION:
            platform, lowest = struct.unpack_from("<II", data, place + 8)
            if platform == _PLATFORM_MACOS:
                return _version(lowest)
        elif kind == _LC_VERSION_MIN_MACOSX:
            return _version(struct.unpack_from("<I", data, place + 8)[0])
        place += size
    return ()


def _version(packed: int) -> tuple[int, int, int]:
    return packed >> 16, packed >> 8 & 0xFF, packed & 0xFF
