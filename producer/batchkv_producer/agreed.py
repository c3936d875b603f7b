"""Numbers and words on which producer and worker must agree. Each is defined only here."""

from __future__ import annotations

BLOCK_TOKENS = 256  # the tokens of a block; prefill chunks end at block boundaries
RUN_ROWS = 128  # consecutive jobs that a worker takes at once; more gain nothing, 16 lose hits
DEFAULT_MAX_TOKENS = 512  # for a row that sets no max_tokens
FAILURE_TTL_DAYS = 7
FAILURE_TTL_SECONDS = FAILURE_TTL_DAYS * 86_400  # how long a failed row's job is kept

# ``bkv_state`` of a worker whose machine is. It then computes fewer rows at once than it could.
SHORT_OF_MEMORY = "short of memory"
