"""The ``batchkv`` command whose ``run`` and ``ask`` start fake workers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from batchkv_producer.cli import main
from batchkv_producer.local import ask as asking
from batchkv_producer.local import run

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))

if __name__ == "__main__":
    run.run = partial(run.run, worker_command=FAKE_WORKER)
    asking.ask = partial(asking.ask, worker_command=FAKE_WORKER)
    main()
