"""Numbers on which producer and worker must agree. Each is defined here only."""

from __future__ import annotations

BLOCK_TOKENS = 256  # prefixes are shared in blocks of so many tokens; prefill chunks end there
RUN_ROWS = 128  # neighbours that a worker takes at once; more gains nothing, 16 lose hits
DEFAULT_MAX_TOKENS = 512  # of a row that does not say
FAILURE_TTL_DAYS = 7
FAILURE_TTL_SECONDS = FAILURE_TTL_DAYS * 86_400  # so long a failed row's job is kept
