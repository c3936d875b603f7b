"""What is compared with what: families, schemes, and how close two logits may be.

A cell is a family under a scheme. ``make test`` runs the cells of ``cut()``; the environment
variable ``BATCHKV_PARITY=all`` (``make parity``) runs every cell and the longer scenarios.
"""

from __future__ import annotations

from batchkv_worker.kv.attention.paths import Path
from parity.few import RUNS_ALL
from support.tiny_models import ALL_FAMILIES

SCHEMES = (
    "float",
    "affine8",
    "affine4",
    "affine4r",
    "k8v4",
    "mxfp8",
    "nvfp4",
    "turbo4",
    "turbo3.5",
    "turbo3",
    "affine4,last=float",
)
# Families that the engine refuses, and why: the rest must be served. A family that is no longer
# refused has to be taken out, one that is newly refused fails.
REFUSED = {
    "llama4": "ChunkedKVCache",
}
SERVED = tuple(family for family in ALL_FAMILIES if family not in REFUSED)
WITHOUT_KEYS = ("mamba2", "rwkv7")  # no layer keeps keys and values: schemes change nothing
ATTENDS_ITSELF = (*WITHOUT_KEYS, "gemma2", "gemma2_mha")  # no cache is asked to attend
WINDOWED = ("gemma3_text", "gpt_oss", "cohere2", "olmo3", "gemma3n", "gemma4_text")


# A row may take the second best token instead of the best where the two logits are this close, in
# standard deviations of the logits. Float rows differ by rounding alone. Of packed rows rounding
# moves a number now and then to the next code, which random weights amplify.
CLOSE_FLOAT = 1e-3
CLOSE_PACKED = 0.05
MOST_TIED = 0.05  # of all rows compared, the share in which that may happen

KERNEL = " by kernel"  # ends the name of a scheme whose slots keep records
_PATHS: tuple[Path, ...] = ("fused", "folded", "packed")
_SPREAD: tuple[Path, ...] = ("spread-fused", "spread-folded", "spread-packed")


def close(scheme: str) -> float:
    """The lead below which the second best token may win under a scheme."""
    return CLOSE_FLOAT if scheme.removesuffix(KERNEL) == "float" else CLOSE_PACKED


def path_of(family: str, scheme: str) -> Path:
    """The attention path of a cell: not measured, so that a run can be repeated."""
    if scheme.endswith(KERNEL):
        return "kernel"
    number = ALL_FAMILIES.index(family) + SCHEMES.index(scheme)
    paths = _SPREAD if scheme.startswith("turbo3") and number % 2 else _PATHS
    return paths[number % len(paths)]


def cells() -> list[tuple[str, str]]:
    """The (family, scheme) that this run compares."""
    return everything() if RUNS_ALL else cut()


def everything() -> list[tuple[str, str]]:
    """Every family that is served, under every scheme that changes it; each by kernel, too."""
    return [
        (family, scheme + ending)
        for family in SERVED
        for ending in ("", KERNEL)
        for scheme in (SCHEMES[:2] if family in WITHOUT_KEYS else SCHEMES)
        if not (ending and family in ATTENDS_ITSELF)
    ]


def cut() -> list[tuple[str, str]]:
    """One family of each kind of cache, and the schemes spread over them."""
    return [
        ("llama", "turbo4"),
        ("gemma2", "affine4"),
        ("gemma3_text", "float"),
        ("gpt_oss", "k8v4"),
        ("qwen3_next", "affine4"),
        ("falcon_h1", "float"),
        ("nemotron_h", "affine8"),
        ("mamba2", "float"),
        ("deepseek_v3", "affine4"),
        ("gemma4_text", "nvfp4"),
    ]
