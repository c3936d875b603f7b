"""How many files the process may have open, whatever a library thinks of that.

``mlx_lm`` sets the limits to 2,048 and 4,096 when it is imported: that fails where the hard one is
lower, and lowers it where it is higher.
"""

from __future__ import annotations

import resource
from typing import Any

WANTED_FILES = 2048  # as mlx_lm wants it: large models have many files


def import_mlx_lm() -> None:
    """Import ``mlx_lm`` for the first time; the soft limit is raised as far as the hard one lets.

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
