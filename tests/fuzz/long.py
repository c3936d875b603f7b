# ruff: noqa: T201  (a helper that talks to a terminal)
"""The long form: each reader for a minute, other bytes each time. ``make fuzz`` runs it.

usage: python tests/fuzz/long.py [READER ...]

``FUZZ_SECONDS`` is the time for each reader. What goes wrong is written, as small as it could be
made, to corpus/<reader>/, and the exit code is 1.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hypothesis import HealthCheck, Phase, given, settings

from fuzz.readers import CHECKS
from fuzz.shapes import SHAPES

SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))
CORPUS = Path(__file__).with_name("corpus")
EXAMPLES_AT_ONCE = 500


def fuzz(reader: str) -> bool:
    """Whether nothing went wrong in the time."""
    until = time.monotonic() + SECONDS
    num_tried = 0
    last = b""

    @settings(
        max_examples=EXAMPLES_AT_ONCE,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(SHAPES[reader])
    def run(data: bytes) -> None:
        nonlocal num_tried, last
        num_tried += 1
        last = data  # after a failure: the smallest one that fails
        CHECKS[reader](data)

    while time.monotonic() < until:
        try:
            run()
        except Exception:  # noqa: BLE001 - whatever it is, it is kept
            folder = CORPUS / reader
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / hashlib.sha256(last).hexdigest()[:16]
            path.write_bytes(last)
            traceback.print_exc()
            print(f"{reader}: went wrong after {num_tried:,} inputs; kept as {path}")
            return False
    print(f"{reader}: {num_tried:,} inputs, a verdict for each", flush=True)
    return True


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(CHECKS)
    sys.exit(0 if all([fuzz(reader) for reader in chosen]) else 1)
