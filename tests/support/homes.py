"""Home folders for commands that start real workers."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

# The processes of one test run have this folder in common, and no other run has. A process whose
# own temporary folder is another one uses it, too.
_FOLDER = os.environ.setdefault(
    "BKV_TEST_RUN", str(Path(tempfile.gettempdir()) / f"bkv-measured-{os.getpid()}")
)


def new_home(path: Path) -> Path:
    """A home folder at ``path`` whose measurements are those of all tests of this run.

    A worker's first start on a machine measures for seconds, and later starts do not. What a first
    start does has tests of its own (``engine/test_kept_measurements.py``).
    """
    shared = shared_folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (path / "measured").exists():
        (path / "measured").symlink_to(shared)
    return path


def shared_folder() -> Path:
    """The folder of the measurements of this run."""
    folder = Path(_FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def remove_measurements() -> None:
    """Delete what this run has measured."""
    shutil.rmtree(shared_folder())
