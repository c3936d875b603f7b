"""Runs the prefix kernel's source as C++ on a CPU, with one thread for each CUDA thread.

It needs a compiler and no GPU. One block runs at a time. Barriers replace CUDA's synchronization.
Only float32; slow.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from batchkv_worker.kv.backends.cuda.prefix_kernel_source import Variant

FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread")

# Replacements for CUDA's words. Threads of a warp wait before and after they read from each other.
_CUDA = """
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

using std::size_t;
using T = float;
struct Place { int x, y; };
static thread_local Place threadIdx, blockIdx;
static Place gridDim;
static std::unique_ptr<std::barrier<>> all;
static std::vector<std::unique_ptr<std::barrier<>>> by_warp;
static float shown[WARPS][32];

static void __syncthreads() { all->arrive_and_wait(); }

static float __shfl_xor_sync(unsigned, float number, int other) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  shown[warp][lane] = number;
  by_warp[warp]->arrive_and_wait();
  const float seen = shown[warp][lane ^ other];
  by_warp[warp]->arrive_and_wait();
  return seen;
}

static float exponential(float number) { return std::exp(number); }
#define __expf exponential
#define __shared__ static
"""
_RUN = """
extern "C" void run(int heads, int rows, PARAMETERS) {
  gridDim = {heads, rows};
  all = std::make_unique<std::barrier<>>(WARPS * 32);
  by_warp.clear();
  for (int warp = 0; warp < WARPS; ++warp) {
    by_warp.push_back(std::make_unique<std::barrier<>>(32));
  }
  std::vector<std::thread> threads;
  for (int thread = 0; thread < WARPS * 32; ++thread) {
    threads.emplace_back([=] {
      threadIdx = {thread, 0};
      for (int row = 0; row < rows; ++row) {
        for (int head = 0; head < heads; ++head) {
          blockIdx = {head, row};
          kernel(NAMES);
          __syncthreads();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}
"""


@cache
def is_there_a_compiler() -> bool:
    """Whether there is a C++ compiler with ``<barrier>``."""
    if shutil.which("c++") is None:
        return False
    tried = subprocess.run(
        ["c++", *FLAGS, "-xc++", "-fsyntax-only", "-"], input=b"#include <barrier>", check=False
    )
    return tried.returncode == 0


def in_threads(folder: Path) -> Callable[[Variant], Callable[..., list[mx.array]]]:
    """A function in place of ``prefix_kernel._kernel``; it compiles in ``folder``."""

    @cache
    def compiled(variant: Variant, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
        parameters = []
        for name in variant.inputs:
            parameters.append(f"const {'bool' if name == 'mask' else 'T'}* {name}")
            parameters += [
                f"const {type_}* {name}_{what}"
                for what, type_ in (("shape", "int"), ("strides", "int64_t"))
                if f"{name}_{what}" in variant.source
            ]
        parameters += [f"T* {name}" for name in variant.outputs]
        declared = ", ".join(parameters)
        run = _RUN.replace("PARAMETERS", declared)
        run = run.replace("NAMES", ", ".join(part.split()[-1] for part in parameters))
        sizes = "".join(f"static constexpr int {name} = {value};\n" for name, value in constants)
        kernel = f"static void kernel({declared}) {{{variant.source}}}\n"
        source = folder / f"{variant.name}-{len([*folder.iterdir()])}.cpp"
        source.write_text(f"#include <cstdint>\n{sizes}{_CUDA}{kernel}{run}")
        library = source.with_suffix(".so")
        subprocess.run(["c++", *FLAGS, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    def kernel_of(variant: Variant) -> Callable[..., list[mx.array]]:
        def kernel(
            inputs: list[mx.array],
            template: list[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
        ) -> list[mx.array]:
            constants = tuple((name, value) for name, value in template if name != "T")
            given, kept = [], []
            for name, array in zip(variant.inputs, inputs, strict=True):
                mx.eval(array)
                view = np.array(memoryview(array), copy=False)  # with the strides that MLX has
                steps = [step // view.itemsize for step in view.strides]
                shape = (ctypes.c_int * view.ndim)(*view.shape)
                strides = (ctypes.c_int64 * view.ndim)(*steps)
                assert f"{name}_strides" in variant.source or view.flags.c_contiguous
                given.append(ctypes.c_void_p(view.ctypes.data))
                given += [shape] if f"{name}_shape" in variant.source else []
                given += [strides] if f"{name}_strides" in variant.source else []
                kept.append(view)
            found = [np.full(shape, np.nan, np.float32) for shape in output_shapes]
            given += [ctypes.c_void_p(array.ctypes.data) for array in found]
            blocks = grid[0] // threadgroup[0], grid[1]
            compiled(variant, constants).run(*blocks, *given)
            return [mx.array(array) for array in found]

        return kernel

    return kernel_of
