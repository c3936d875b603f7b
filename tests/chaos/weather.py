"""Everything that can go wrong, in its long form: ``make chaos``.

    python tests/chaos/weather.py [--seed N] [--faults FILE] [--only NAME]

Storms of faults over workers and server, bad lines, broken caches, and ``make fuzz`` where there is
such a target. Without ``--seed`` a new one is drawn; it is printed, and the same again repeats the
faults. ``--faults`` follows the log that a failed storm has left (see what it printed). The soak is
a target of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 25 * 60


def limited(command: list[str], environ: dict[str, str]) -> int:
    """Its exit code. One that takes too long is interrupted, and ends what it has started."""
    process = subprocess.Popen(command, cwd=ROOT, env=environ)
    try:
        return process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"not done after {LIMIT_SECONDS // 60} minutes", flush=True)
        process.send_signal(signal.SIGINT)
        return process.wait() or 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=Path, help="a log of faults to follow")
    parser.add_argument("--only", default="", metavar="NAME", help="as pytest's -k")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    environ = {**os.environ, "BATCHKV_CHAOS": "long", "CHAOS_SEED": str(options.seed)}
    if options.faults:
        environ["CHAOS_FAULTS"] = str(options.faults.absolute())
        options.only = options.only or "test_kills_outages_and_sleep"
    command = [sys.executable, "-m", "pytest", "tests/chaos", "-s", "-k", options.only]
    code = limited(command, environ)
    if code or options.only:
        return code
    has_fuzz = subprocess.run(["make", "-n", "fuzz"], cwd=ROOT, capture_output=True).returncode == 0
    # What ``make chaos`` was told in ARGS is not for the other target.
    return subprocess.run(["make", "fuzz", "ARGS="], cwd=ROOT).returncode if has_fuzz else 0


if __name__ == "__main__":
    sys.exit(main())
