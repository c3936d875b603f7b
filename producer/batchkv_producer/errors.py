"""The producer's error tree. Every message says what was wrong and what to do about it.

    BatchkvError
    ├── UsageError            the caller's arguments or settings: nothing was changed
    │   ├── InputFileError    the input file as a whole cannot be used
    │   └── NotFoundError     no batch or job by that id
    │       └── ExpiredError  its results are no longer kept
    ├── DiskError             a disk is full: make room, and the same command goes on
    │   └── FullHomeError     the one on which the embedded server keeps what it has
    ├── ServerError           Redis is missing, refuses us, is full or read-only
    └── WireError             bytes from Redis are not what batchkv writes

A row of the input that is wrong is not an exception: it is a ``RowError`` value
(``formats``), because one bad row never stops the others.
"""

# Of a folder that is installed in place: its code was updated, and what pip wrote beside was not.
OLD_INSTALLATION = (
    "the code of batchkv is newer than its installation: run `make venv`, or install it again"
)


class BatchkvError(Exception):
    """Base of everything that batchkv raises on purpose; ``exit_code`` is the CLI's."""

    exit_code = 1


class UsageError(BatchkvError):
    """An argument or a setting is wrong; nothing was changed."""

    exit_code = 2


class InputFileError(UsageError):
    """The input file as a whole cannot be read."""


class NotFoundError(UsageError):
    """No batch or job is known by that id."""


class ExpiredError(NotFoundError):
    """The batch ended longer ago than its results are kept."""


class DiskError(BatchkvError):
    """A disk takes nothing more; nothing is lost, and the same command goes on."""

    exit_code = 4


class FullHomeError(DiskError):
    """The disk of the home folder is full: the embedded server takes no writes."""


class ServerError(BatchkvError):
    """Redis cannot be reached, refuses the operation, is full or read-only."""

    exit_code = 3


class WireError(BatchkvError):
    """Bytes read from Redis are not something that batchkv wrote."""
