"""Every key that the gateway keeps in Redis, documented once.

``O`` is an owner: ``local`` without API keys, else the id of the key with which it was made. ``F``
is the id of a file, ``B`` that of a gateway's batch. Times are seconds since 1970.

================================  ====  ===========================================================
key                               type  content
================================  ====  ===========================================================
``batchkv:gateway:keys``          hash  id of a key -> JSON: ``name``, ``digest`` (SHA-256 of the
                                        secret), ``created``; true if it has the right: ``admin``,
                                        ``metrics``, ``private``; its limits: ``rows``, ``bytes``
``batchkv:gateway:rows:O``        hash  ``B``, or the id of a batch in the queue -> how many rows
                                        it had at first, and since when: the owner's open rows
``batchkv:gateway:files:O``       zset  ids of the owner's files, all with the score 0, so that they
                                        sort by time. ``batchkv:gateway:files:O:P`` has those with
                                        purpose ``P``
``batchkv:gateway:file:F``        hash  ``owner``, ``sha256``, ``bytes``, ``created``, ``filename``,
                                        ``purpose``, ``expires`` (0: never)
``batchkv:gateway:uses:F``        hash  open batches that read file ``F``
``batchkv:gateway:deleted:F``     hash  ``owner``: whose file ``F`` was deleted, for ten minutes
``batchkv:gateway:expiring``      zset  id of a file -> ``expires``
``batchkv:gateway:pending``       zset  name in the folder -> since when: contents that are about to
                                        get a file, or that have lost it
``batchkv:gateway:batches:O``     zset  ids of the owner's batches, like ``files:O``
``batchkv:gateway:batch:B``       hash  the batch (``batches.record``)
``batchkv:gateway:facts:B``       hash  ``facts``: what `batchkv report` says of ``B`` once its rows
                                        have left the queue: JSON in zlib's format. It expires
``batchkv:gateway:same``          hash  digest of what was asked for -> ``B``
``batchkv:gateway:open``          zset  batches that are not over -> when they were made
``batchkv:gateway:leases``        hash  ``B`` -> ``HOLDER MILLISECONDS``: who works on it, and until
                                        when
``batchkv:gateway:spent``         hash  ``B`` -> id of its batch in the queue, which can be deleted
``batchkv:gateway:owners``        hash  id of a batch in the queue -> ``O``, or ``O B`` if it is a
                                        part of ``B``. The CLI's batches are not here
``batchkv:gateway:native:O``      zset  ids in the queue of the batches that the owner made without
                                        OpenAI's API -> when
``batchkv:gateway:outbox:T``      zset  event -> when it is sent. ``T`` names a URL of ``--webhook``
``batchkv:gateway:events:T``      hash  event -> JSON: when it came, how often it was sent, its body
``batchkv:gateway:ended``         zset  ``B`` -> when its record is deleted
``batchkv:gateway:session:S``     hash  ``whose`` session of the page it is: the id of a key, or
                                        ``operator``. ``S`` is the SHA-256 of the cookie. It expires
``batchkv:gateway:ticket:S``      hash  the same, of a ticket that begins one session
================================  ====  ===========================================================
"""

from __future__ import annotations

PREFIX = "batchkv:gateway:"
KEYS = f"{PREFIX}keys"
EXPIRING = f"{PREFIX}expiring"
PENDING = f"{PREFIX}pending"
SAME = f"{PREFIX}same"
OPEN = f"{PREFIX}open"
LEASES = f"{PREFIX}leases"
SPENT = f"{PREFIX}spent"
ENDED = f"{PREFIX}ended"
OWNERS = f"{PREFIX}owners"


def open_rows(owner: str) -> str:
    """Key of an owner's open rows."""
    return f"{PREFIX}rows:{owner}"


def session(digest: str) -> str:
    """Key of a session of the page."""
    return f"{PREFIX}session:{digest}"


def ticket(digest: str) -> str:
    """Key of a ticket for a session of the page."""
    return f"{PREFIX}ticket:{digest}"


def outbox(target: str) -> str:
    """Key of the events that a webhook's target has not accepted yet."""
    return f"{PREFIX}outbox:{target}"


def events(target: str) -> str:
    """Key of the contents of these events."""
    return f"{PREFIX}events:{target}"


def files(owner: str, purpose: str = "") -> str:
    """Key of an owner's files, or of those with one purpose."""
    return f"{PREFIX}files:{owner}{':' if purpose else ''}{purpose}"


def file(file_id: str) -> str:
    """Key of a file's facts."""
    return f"{PREFIX}file:{file_id}"


def uses(file_id: str) -> str:
    """Key of the open batches that read a file."""
    return f"{PREFIX}uses:{file_id}"


def deleted(file_id: str) -> str:
    """Key of a file that was deleted not long ago."""
    return f"{PREFIX}deleted:{file_id}"


def batches(owner: str) -> str:
    """Key of an owner's batches."""
    return f"{PREFIX}batches:{owner}"


def native(owner: str) -> str:
    """Key of an owner's batches that were made without OpenAI's API."""
    return f"{PREFIX}native:{owner}"


def batch(batch_id: str) -> str:
    """Key of a batch."""
    return f"{PREFIX}batch:{batch_id}"


def facts(batch_id: str) -> str:
    """Key of the facts of an ended batch's report."""
    return f"{PREFIX}facts:{batch_id}"
