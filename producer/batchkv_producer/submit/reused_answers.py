"""``--reuse``: rows end with answers that were computed for earlier batches.

The contract, and who keeps it:

- **Which answers.** A row may end with an answer if its temperature is 0 or it has a seed, and if
  an earlier batch with ``--reuse`` had an equal request: equal digests (``order.duplicates``). They
  depend on everything but the ``custom_id``: also on ``n``, ``logprobs``, tools, formats of
  answers, the style and system message of plain prompts, and a private key's salt.
- **Who computed it.** Queue (the model's name and its adapter), fingerprint of all files of model,
  tokenizer, chat template and adapter, KV scheme and dtype's class are equal. A producer holds no
  model, so it cannot know these. The worker that takes the row does, and ``pull`` looks the answer
  up in the same step (``lua/reuse.lua``). So a mixed or changing fleet makes no difference.
- **Who may remember.** ``finish`` alone stores answers. The worker makes the digest from the
  request that it computed. Only workers may write these keys, so no producer can forge an answer.
- **Whose.** Batches exchange answers within one scope: one key of the gateway, or all batches that
  are submitted without a key.
- **How long.** The worker's settings bound time, number and bytes; the oldest go first. ``batchkv
  forget`` deletes what the batch had stored. Failed and canceled rows are never remembered.
"""

from __future__ import annotations

from redis import Redis
from redis.exceptions import NoPermissionError

from batchkv_producer.errors import BatchkvError
from batchkv_producer.progress import rows
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import BatchOptions


def check_reuse(connection: Redis, options: BatchOptions) -> None:
    """Raise BatchkvError if the server's rights are older than remembered answers."""
    if not options.reuse:
        return
    try:
        connection.exists(redis_keys.REUSE_ORDER)
    except NoPermissionError:
        raise BatchkvError(
            "--reuse: the hub's users have rights of an older version, so no answer would be "
            "remembered. Run deploy/hub/setup.sh of this version on the hub"
        ) from None


def reuse_note(num_never: int) -> str:
    """A sentence about rows of a batch with --reuse that are always computed; "" for none."""
    if not num_never:
        return ""
    return (
        f"{rows(num_never, 'is', 'are')} computed in spite of --reuse, because answers without "
        "temperature 0 or a seed are meant to differ"
    )
