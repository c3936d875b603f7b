"""Keeps the limit of open files when ``mlx_lm`` is imported.

``mlx_lm`` sets the limits to 2,048 and 4,096 when it is imported. That fails if the hard limit is
lower, and lowers it if it is higher.
"""

from __future__ import annotations

import resource
from typing import Any

WANTED_FILES = 2048  # as mlx_lm wants it: large models have many files


def import_mlx_lm() -> None:
    """Import ``mlx_lm`` for the first time, and raise the soft limit as far as the hard one allows.

    Call it before anything else imports ``mlx_lm``.
    """
    library: Any = resource
    set_limits, library.setrlimit = resource.setrlimit, lambda *_: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        library.setrlimit = set_limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
