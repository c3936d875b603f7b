"""NVIDIA's runtime compiler, as a library that MLX loads: CUDA's language to machine code.

MLX compiles kernels with it, too, but each of them again in every process, with headers that alone
take more than a second. Nothing is installed for this: where the library or the headers of number
formats are not found, MLX compiles.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger("batchkv.engine")

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
HEADERS = ("cuda_bf16.h", "cuda_fp16.h")
_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_USUAL_HOME = Path("/usr/local/cuda")
_MAPS = Path("/proc/self/maps")  # where the system says which file a library is


class CompilerError(RuntimeError):
    """A program does not compile, or the compiler fails. Says what the compiler said."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """``version`` tells compilers apart; ``headers`` is the folder of CUDA's headers."""

    library: Any
    version: str
    headers: Path

    def compile(self, program: str, name: str, architecture: str) -> bytes:
        """The machine code of ``program`` for ``architecture`` (``sm_90``).

        ``name`` is what messages call it. Raises CompilerError.
        """
        handle = ctypes.c_void_p()
        text, file = program.encode(), f"{name}.cu".encode()
        self._call("nvrtcCreateProgram", ctypes.byref(handle), text, file, 0, None, None)
        try:
            options = self._options(architecture)
            number = len(options)
            given = (ctypes.c_char_p * number)(*(option.encode() for option in options))
            if self.library.nvrtcCompileProgram(handle, number, given):
                said = self._bytes(handle, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                raise CompilerError(f"{name}: {said.rstrip(bytes(1)).decode(errors='replace')}")
            return self._bytes(handle, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(handle))

    def _options(self, architecture: str) -> Sequence[str]:
        return f"--gpu-architecture={architecture}", f"--include-path={self.headers}"

    def _bytes(self, handle: ctypes.c_void_p, size_call: str, call: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_call, handle, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._call(call, handle, found)
        return found.raw

    def _call(self, function: str, *given: object) -> None:
        if code := getattr(self.library, function)(*given):
            raise CompilerError(f"{function} failed with code {code}")


@cache
def find_compiler() -> Compiler | None:
    """The compiler of this process; None, where it or the headers are not found."""
    for name, mode in _tries(LIBRARIES):
        try:
            library = ctypes.CDLL(name, mode)
            major, minor = ctypes.c_int(), ctypes.c_int()
            if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
                continue
        except (OSError, AttributeError) as fault:
            log.debug("no %s: %s", name, fault)
            continue
        headers = _headers(name)
        if headers is not None:
            return Compiler(library, f"{major.value}.{minor.value} {headers}", headers)
        log.debug("CUDA's headers %s are not found", ", ".join(HEADERS))
    return None


def _tries(names: Sequence[str]) -> Sequence[tuple[str, int]]:
    """What to try: each library if it is loaded already, and only then one that is not."""
    modes = getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE, ctypes.DEFAULT_MODE
    return [(name, mode) for mode in modes for name in names]


def _headers(library: str) -> Path | None:
    """The folder of the first CUDA that has the headers."""
    homes = [Path(os.environ[name]) for name in _VARIABLES if os.environ.get(name)]
    homes += [_USUAL_HOME, *_homes_of(library)]
    folders = (home / "include" for home in homes)
    return next((one for one in folders if all((one / name).is_file() for name in HEADERS)), None)


def _homes_of(library: str) -> list[Path]:
    """The folders above that of a library which this process has loaded."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    ending = f"/{Path(library).name}"
    files = {line.split(maxsplit=5)[-1] for line in lines if ending in line}
    return [Path(file).parent.parent for file in sorted(files)]
