"""Numbers and words on which producer and worker must agree. Each is defined only here."""

from __future__ import annotations

BLOCK_TOKENS = 256  # the tokens of a block; prefill chunks end at block boundaries
RUN_ROWS = 128  # consecutive jobs that a worker takes at once; more gain nothing, 16 lose hits
DEFAULT_MAX_TOKENS = 512  # for a row that sets no max_tokens
MAX_BIAS = 100  # of ``logit_bias``, and of its negative
MAX_BIASED_TOKENS = 1024  # in a row's ``logit_bias``
MAX_STOP_TOKENS = 1024  # in a row's ``stop_token_ids``
MAX_BAD_WORDS = 1024  # of a row
MAX_BAD_WORD_BYTES = 256
FAILURE_TTL_DAYS = 7
FAILURE_TTL_SECONDS = FAILURE_TTL_DAYS * 86_400  # how long a failed row's job is kept

# ``bkv_state`` of a worker whose machine is. It then computes fewer rows at once than it could.
SHORT_OF_MEMORY = "short of memory"
