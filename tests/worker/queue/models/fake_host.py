"""A host whose processes have fake engines. Arguments: A,B C --name NAME --burst --stay SECONDS.

Each argument is a group of models that fit together. MLX is not imported.
"""

from __future__ import annotations

import argparse
import os
import sys

from batchkv_producer.server import connection
from batchkv_worker.errors import WorkerError
from batchkv_worker.queue.models import host as host_module
from batchkv_worker.queue.models import run, setbacks
from batchkv_worker.queue.models.groups import Group
from batchkv_worker.queue.models.holding import Command
from batchkv_worker.queue.models.host import Host, HostPlan
from batchkv_worker.queue.startup import exit_with

host_module.LOOK_SECONDS = 0.1  # tests wait for it again and again
setbacks.IDLE_SECONDS = 1.0
setbacks.REFUSED_SECONDS = float(os.environ.get("FAKE_REFUSED_SECONDS", "600"))
COMMAND = (sys.executable, "-m", "support.fake_engine")
LOAD_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--name", default="host")
    parser.add_argument("--stay", type=float, default=0.0)
    parser.add_argument("--burst", action="store_true")
    options, flags = parser.parse_known_args()
    groups = [Group(tuple(words.split(","))) for words in options.groups]
    models = [model for group in groups for model in group.models]
    url = os.environ["BATCHKV_REDIS_URL"]
    redis = connection.connect(url)
    plan = HostPlan(
        name=options.name,
        groups=groups,
        load_seconds=dict.fromkeys(models, LOAD_SECONDS),
        stay_seconds=options.stay,
        command=Command(COMMAND, tuple(flags), url, drain_seconds=5.0),
        is_burst=options.burst,
    )
    run.begin_log("INFO")
    try:
        host = Host(redis, plan)
        with run.heeded_signals(host.stop):
            code = host.run()
    except WorkerError as fault:
        exit_with(fault)
    sys.exit(code)


if __name__ == "__main__":
    main()
