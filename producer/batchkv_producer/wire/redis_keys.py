"""Every key that batchkv keeps in Redis, documented once.

These are batchkv's own keys. ``B`` is a batch (16 hex digits), ``Q`` a queue. Rows are numbered by
the line of the input:

=========================  ======  ==============================================================
key                        type    content
=========================  ======  ==============================================================
``batchkv:batches``        zset    batch id -> creation time (seconds since 1970)
``batchkv:batch:B``        hash    ``digest`` (64 hex), ``name``, ``model``, ``queue``, ``total``,
                                   ``created``, ``chunks`` (enqueued so far), ``num_chunks``,
                                   ``last_line`` (above ``total`` if the file has blank lines),
                                   ``order`` (version of the rows' order; missing: 1),
                                   ``rules`` (version of the rules for fields; missing: before 1),
                                   ``style`` of plain prompts (``auto``, ``raw``; missing: raw) and
                                   ``system``, the message before each (``prompting``),
                                   ``thinking`` (``off``: templates are asked for none),
                                   ``job_timeout`` (seconds; that of the last submit or retry),
                                   ``defaults`` (JSON: parameters for rows that do not set them);
                                   only if requested: ``priority`` (``high``, ``low``), ``expires``
                                   (the deadline, seconds since 1970), ``dedupe`` (1), ``reuse``
                                   (the scope of its remembered answers: ``local``, or the id of
                                   a gateway's key), ``keep`` (seconds after the end), then
                                   ``kept_until`` and ``kept_jobs``;
                                   the known parts of its maker:
                                   ``fingerprint`` (of the model's files, 32 hex digits),
                                   ``scheme`` (of keys and values), ``dtype`` (``float32``,
                                   ``half``); ``mixed`` (1: several schemes and dtypes are allowed),
                                   ``needs`` (abilities that some row needs of its worker);
                                   ``adapter`` (its name, if ``model`` is ``MODEL@NAME``),
                                   of later generations: ``generation`` (2, 3 ...) and ``base``
                                   (id of the first);
                                   ``forgotten`` (1: `batchkv forget` has begun), and then
                                   ``forgotten_lines``, the number of deleted lines;
                                   counters ``ok failed canceled running prompt_tokens
                                   completion_tokens cached_tokens busy_ms saved_ms copied kept
                                   cut reused``
``batchkv:batch:B:rows``   hash    for each stretch of lines: the digests of its rows' requests,
                                   and their custom_ids (``row_facts``)
``batchkv:res:B``          hash    line number -> encoded result (``job.encode_result``)
``batchkv:done:B``         list    line numbers in the order in which they ended. Append only: a
                                   retried row is added again when it ends again
``batchkv:held:B``         hash    line number -> execution, of the rows that count as ``running``
``batchkv:twins:B:<n>``    list    duplicates of line n, which wait for its end
``batchkv:due:Q``          hash    job id -> outcome, of ended leaders that have open duplicates
``batchkv:lock:Q``         string  name of the worker that cleaned queue ``Q`` last; expires, so
                                   that one worker cleans in each interval
``batchkv:lock:Q:apart``   string  name of the worker that takes no new rows until it can take the
                                   suspects of queue ``Q``, so that no other does; expires
``batchkv:lock:models``    hash    ``version``: the number of claims of hosts so far (``hosts``)
``batchkv:live:wish:Q``    hash    ``at``: when somebody last asked for an answer of a model that no
                                   worker held, but a host may load; expires after 2 minutes
``batchkv:live:Q``         list    ids of live rows of queue ``Q`` that wait; the left end is the
                                   head
``batchkv:live:row:L``     hash    live row ``L``: ``queue``, ``data`` (as of a job), ``to`` (the
                                   asker), ``needs`` (abilities), ``fingerprint``, ``timeout``
                                   (seconds), ``pieces`` (those that are wanted: ``live.Pieces``),
                                   ``sent`` (pieces of its answer so far), ``again`` (1: queued
                                   again once). While a worker has it: ``exec`` (the lease),
                                   ``worker``, ``until`` (the lease's end, seconds since 1970). It
                                   expires 30 s after the asker's last sign of life
``batchkv:live:to:A``      stream  pieces of answers and results for asker ``A``; expires
``batchkv:live:seen:Q``    string  the last worker that answered live rows of ``Q``; expires after
                                   60 s
``batchkv:live:seen:Q:used``
                           string  1, if a worker had live rows of ``Q``; expires after 60 s
``batchkv:samples:Q``      list    one JSON object for each minute of queue ``Q``, the oldest first
                                   (``monitor.samples.Sample``). At most 1,440; expires 2 days after
                                   the last
``batchkv:samples:all:Q``  hash    the work of all workers of ``Q``: ``prompt_tokens``,
                                   ``cached_tokens``, ``completion_tokens``, ``rows_done``,
                                   ``rows_failed``; of its last sample: ``minute`` (its beginning),
                                   ``waiting``, ``running``, ``workers``, and the totals at its
                                   beginning (``rows_done_before`` ...). Expires likewise
``batchkv:reuse:a:K``      string  a remembered answer (``lua/reuse.lua``): ``c`` if it was cut at
                                   max_tokens, else ``-``, then its result; expires. ``K`` has 40
                                   hex digits, made from all that decides the answer. Producers may
                                   only read and delete these three kinds of keys
``batchkv:reuse:order``    zset    K -> where it ends among all bytes that were ever remembered
``batchkv:reuse:of:B``     list    ``K:place`` for each answer that batch B stored; expires
``batchkv:pace:Q``         hash    worker's name -> what it tells the others of ``Q``: its speed and
                                   what it holds (``worker.queue.runs.pace``). Expires after a day
=========================  ======  ==============================================================

``queued`` is never stored: it is ``total - ok - failed - canceled - running``. The rows shown as
running are those in ``batchkv:held:B``; the counter is written for older versions. If a batch has
``keep``, its keys up to ``batchkv:done`` expire together. Its id stays in ``batchkv:batches``, so
that an expired batch differs from an unknown one. A forgotten batch leaves no key.

A **live row** is no job of RQ: nothing lists it, and nothing of it is kept. Its moves (``live.py``)
are these. ``ask``: queued, if a worker can answer it. ``turn``: a worker takes it, with a lease of
10 s that it renews. ``write``: pieces of the answer leave by the asker's stream; with the result,
the row is deleted. ``keep``: the asker lives. If the worker's lease is over, the row is queued
again, but only once, and only if no piece was sent; else it has ended. ``cancel``: the row is
deleted.

RQ's keys (rq 2.12), as the scripts in ``lua/`` write them, for a job ``J`` = ``B-<line>`` in queue
``Q``:

=========================  ======  ==============================================================
``rq:queues``              set     ``rq:queue:Q``
``rq:queue:Q``             list    ids waiting; the left end is the head. ``rq:queue:Q:high`` and
                                   ``rq:queue:Q:low`` are the lists of the other priorities; all
                                   three have the same jobs and registries. An entry that is about
                                   to be removed is ``batchkv:swept``
``rq:job:J``               hash    RQ's job. batchkv adds: ``bkv_exec``, the execution that
                                   holds the job now (the lease: only its holder may end the job),
                                   ``bkv_begun``, 1 once its holder's engine has it,
                                   ``bkv_died``, how many holders died with it begun (and
                                   ``bkv_deaths``, the count that older versions read),
                                   ``bkv_suspect``, the group with which it runs apart since, and
                                   ``bkv_halves``, half deaths counted in it (``suspects.lua``),
                                   ``bkv_shared``, bytes of its text that others begin with, after
                                   a 0 if it is the first of its prefix in the queue,
                                   ``bkv_needs``, the abilities that it needs of its worker,
                                   ``bkv_reuse``, the digest of its request (16 bytes) and its
                                   custom_id, if it may end with a remembered answer. Of
                                   duplicates: ``bkv_custom_id``, ``bkv_first``
                                   (line of the group's first row), and in that one's hash
                                   ``bkv_lead`` (the line that runs, if it is another); ``bkv_cut``
                                   (1) of a row that ended at max_tokens and had duplicates
``rq:wip:Q``               zset    ``J:<execution>`` -> the second at which its lease ends
``rq:executions:J``        zset    execution -> expiry, for RQ's tools
``rq:execution:J:<exec>``  hash    the execution, for RQ's tools; expires
``rq:finished:Q``          zset    J -> when RQ may forget it; likewise ``failed``, ``canceled``.
                                   The set of finished jobs expires with the last of them
``rq:worker:<name>``       hash    RQ's worker. With each heartbeat, a worker of batchkv writes:
                                   ``bkv_version``, ``bkv_model``, ``bkv_fingerprint``,
                                   ``bkv_scheme``, ``bkv_dtype``, ``bkv_adapters``
                                   (``NAME:fingerprint`` of each model with an adapter, between
                                   blanks), ``bkv_abilities``, ``bkv_state``
                                   (``loading 2.1 of 7.3 GB``, ``finishing 12 rows``,
                                   ``paused: on battery`` or empty),
                                   ``bkv_tokens_per_second`` (of the last minute), ``bkv_memory``
                                   (bytes), ``bkv_slots`` (rows that it decodes at once; 0 until
                                   its model is loaded), ``bkv_beat_ms`` (the time between two
                                   heartbeats) and ``bkv_seen`` (the last one, by the server's time)
                                   ``bkv_live`` (1: it answers live rows), ``bkv_figures`` (JSON,
                                   ``wire.figures.worker``) and ``bkv_counted`` (what its queue's
                                   totals have of its work). ``bkv_drain`` is written by whoever
                                   drains the worker: 1, until it is resumed. A host (``hosts``)
                                   has ``bkv_models`` (JSON: the models that it may serve),
                                   ``bkv_held`` (JSON: model -> the worker that holds it) and
                                   ``bkv_refused`` (JSON: those that it could not load)
``rq:workers``             set     keys of all workers; ``rq:workers:Q`` those of one queue
``rq:suspended``           string  while it is there, no worker takes jobs
``rq:pubsub:<name>``       channel RQ's commands to a worker (``stop-job``)
=========================  ======  ==============================================================
"""

from __future__ import annotations

import hashlib
import re

BATCHES = "batchkv:batches"
QUEUE_PREFIX = "batchkv:"
RQ_QUEUES = "rq:queues"
SUSPENDED = "rq:suspended"
SWEPT = "batchkv:swept"
MODEL_CLAIMS = "batchkv:lock:models"
DRAIN = "bkv_drain"  # a field of a worker's record
PRIORITIES = ("high", "normal", "low")
REUSE_ORDER = "batchkv:reuse:order"

_JOB_ID = re.compile(r"([0-9a-f]{16})-([1-9][0-9]{0,11})")


def batch(batch_id: str) -> str:
    """Key of the batch's hash."""
    return f"batchkv:batch:{batch_id}"


def results(batch_id: str) -> str:
    """Key of the batch's results by line number."""
    return f"batchkv:res:{batch_id}"


def held(batch_id: str) -> str:
    """Key of the holders of a batch's rows."""
    return f"batchkv:held:{batch_id}"


def rows(batch_id: str) -> str:
    """Key of the facts that a batch stores for every row (``row_facts``)."""
    return f"batchkv:batch:{batch_id}:rows"


def done(batch_id: str) -> str:
    """Key of the batch's finish order."""
    return f"batchkv:done:{batch_id}"


def maintenance_lock(queue: str) -> str:
    """Key that exists if the queue was cleaned in this interval."""
    return f"batchkv:lock:{queue}"


def apart_lock(queue: str) -> str:
    """Key that exists while a worker drains its engine to take the queue's suspects."""
    return f"{maintenance_lock(queue)}:apart"


def job(job_id: str) -> str:
    """Key of RQ's job hash."""
    return f"rq:job:{job_id}"


def raw_job(job_id: bytes) -> bytes:
    """The same, for any entry of a queue's list."""
    return b"rq:job:" + job_id


def queue(name: str) -> str:
    """Key of RQ's list of waiting ids."""
    return f"rq:queue:{name}"


def waiting(name: str, priority: str) -> str:
    """Key of the list in which a queue's jobs of this priority wait."""
    return queue(name) if priority == "normal" else f"{queue(name)}:{priority}"


def waiting_lists(name: str) -> list[str]:
    """Keys of a queue's lists, the highest priority first."""
    return [waiting(name, priority) for priority in PRIORITIES]


def due(name: str) -> str:
    """Key of the ended leaders that have duplicates without a result."""
    return f"batchkv:due:{name}"


def registry(kind: str, name: str) -> str:
    """Key of one of RQ's registries: kind is wip, finished, failed or canceled."""
    return f"rq:{kind}:{name}"


def live(name: str) -> str:
    """Key of the live rows that wait in a queue."""
    return f"batchkv:live:{name}"


def live_wish(name: str) -> str:
    """Key that exists if somebody lately wanted an answer of a model that no worker held."""
    return f"batchkv:live:wish:{name}"


def live_used(name: str) -> str:
    """Key that exists if a worker had live rows of a queue in the last minute."""
    return f"{live_seen(name)}:used"


def live_row(row_id: str) -> str:
    """Key of a live row."""
    return f"batchkv:live:row:{row_id}"


def live_stream(asker: str) -> str:
    """Key of the stream of an asker."""
    return f"batchkv:live:to:{asker}"


def live_seen(name: str) -> str:
    """Key that exists if a worker answered live rows of a queue in the last minute."""
    return f"batchkv:live:seen:{name}"


def samples(name: str) -> str:
    """Key of the samples of a queue."""
    return f"batchkv:samples:{name}"


def totals(name: str) -> str:
    """Key of the totals of a queue, and of its sample that is not stored yet."""
    return f"batchkv:samples:all:{name}"


def paces(name: str) -> str:
    """Key of what the workers of a queue tell each other of their pace."""
    return f"batchkv:pace:{name}"


def worker(name: str) -> str:
    """Key of RQ's worker hash."""
    return f"rq:worker:{name}"


def workers(name: str = "") -> str:
    """Key of RQ's set of the workers of a queue, or of all workers."""
    return f"rq:workers:{name}" if name else "rq:workers"


def commands(name: str) -> str:
    """RQ's channel of commands to a worker."""
    return f"rq:pubsub:{name}"


def job_id(batch_id: str, line: int) -> str:
    """Id of the job for one line (counted from 1) of a batch."""
    return f"{batch_id}-{line}"


def parse_job_id(value: str) -> tuple[str, int] | None:
    """(batch id, line number) of a job id, or None for a job that is not batchkv's."""
    match = _JOB_ID.fullmatch(value)
    return (match[1], int(match[2])) if match else None


def queue_name(model: str) -> str:
    """The queue of a model: ``batchkv:<slug>-<8 hex digits of the name's SHA-256>``.

    The digits distinguish names with the same slug. The slug is for people.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", model.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-")
    digits = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{QUEUE_PREFIX}{slug[:40].strip('-') or 'model'}-{digits}"
