"""Starts of a worker's engine: how long one takes once the model is loaded, and what it chooses.

    python tests/benchmarks/product/bench_starts.py --shape 4b [--starts 5] [--json FILE]
    python tests/benchmarks/product/bench_starts.py --quick

Each start is a process of its own, with the same home folder, and builds the engine that
``batchkv worker`` builds at its defaults. The first one measures and compiles, unless ``--kept``
names a home where that is done. Compared are what each engine uses (attention paths, sizes of
chunks, kernels in place of the model's operations), and the results that are stored for such an
engine. Exit code 1 if two starts have different ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import product_parts as parts
from product_arguments import add_folders, environment_of

MEASURING = "measuring the fastest settings"  # what a worker reports when its model is loaded
Start = dict[str, Any]


def build(model: str) -> Start:
    """One start, in this process: seconds until loaded and until ready, and its results."""
    begun = time.perf_counter()
    from batchkv_worker.engine.factory import build_engine
    from batchkv_worker.model.load_progress import listening
    from batchkv_worker.settings import WorkerSettings
    from batchkv_worker.tune.tuning import tuning_of

    moments: dict[str, float] = {}

    def note(report: str) -> None:
        moments[report] = time.perf_counter() - begun

    with listening(note):
        engine = build_engine(WorkerSettings.from_env({}, model=model))
    ready = time.perf_counter() - begun
    used = tuning_of(engine).as_json() | {"layers": None}  # whose times are among the stored
    used["paths"] = {str(scheme): path for scheme, path in engine.plan.paths.items()}
    file = engine.plan.backend.measurements.file
    engine.close()
    stored = {} if file is None else json.loads(file.read_text("utf-8"))
    results = {"used": used, "stored": stored}
    return {"loaded": moments[MEASURING], "ready": ready, "results": results}


def start(model: Path, home: Path) -> Start:
    """One start in a process of its own. SystemExit if it fails."""
    done = subprocess.run(
        [sys.executable, __file__, "--build", str(model)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of({"BATCHKV_HOME": str(home)}),
    )
    if done.returncode:
        raise SystemExit(f"a start ended with exit code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The values of a JSON document by their place in it."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        place: leaf
        for name, one in value.items()
        for place, leaf in leaves(one, f"{path}/{name}").items()
    }


def different(starts: list[Start]) -> list[str]:
    """Places at which the starts have not all the same result."""
    found = [leaves(one["results"]) for one in starts]
    first, places = found[0], sorted(set().union(*found))
    return [place for place in places if any(one.get(place) != first.get(place) for one in found)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=list(parts.SHAPES), default="tiny")
    add_folders(parser)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two starts")
    parser.add_argument("--json", type=Path, help="what each start took and chose, after each")
    parser.add_argument("--build", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.starts < 2:
        parser.error("--starts is 2 or more")
    if args.quick:
        args.starts = 2
    return args


def main() -> int:
    args = arguments()
    if args.build:
        print(json.dumps(build(args.build)))
        return 0
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="bkv-bench-", dir="/tmp") as folder:
        model = (args.models or Path(folder)) / f"bench-{args.shape}"
        parts.make_model(model, args.shape)
        for _ in range(args.starts):
            found = start(model, args.kept or Path(folder) / "home")
            starts.append(found)
            after = found["ready"] - found["loaded"]
            print(f"  loaded after {found['loaded']:.2f} s, ready {after:.2f} s later", flush=True)
            if args.json:
                args.json.write_text(json.dumps(starts, indent=1) + "\n", "utf-8")
    count = len(leaves(starts[0]["results"]))
    unequal = different(starts)
    print(f"\n{len(starts)} starts, {count} results, {len(unequal)} of them different")
    for place in unequal:
        print(f"  {place}: {[leaves(one['results']).get(place) for one in starts]}")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
