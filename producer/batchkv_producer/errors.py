"""The producer's error tree. Every message says what was wrong and what to do about it.

    BatchkvError
    ├── UsageError            a wrong argument, setting or input; nothing was changed
    │   ├── InputFileError    the input file as a whole cannot be used
    │   └── NotFoundError     there is no batch or job with this id
    │       └── ExpiredError  the batch and its results have expired
    ├── DiskError             a disk is full: make room, and run the same command again
    │   └── FullHomeError     the disk of the embedded server is full
    ├── ServerError           Redis is missing, refuses an operation, is full or read-only
    │   ├── RefusedError      the user of the URL has no right to the operation
    │   └── AwayError         a gateway cannot be reached now
    └── WireError             bytes from Redis were not written by batchkv

A wrong row of the input is no exception. It is a ``RowError`` value (``formats``), because a wrong
row never stops the others.
"""

# For an editable installation whose code was updated, while pip's metadata was not.
OLD_INSTALLATION = (
    "the code of batchkv is newer than its installation: run `make venv`, or install it again"
)


class BatchkvError(Exception):
    """The base of all errors of batchkv. ``exit_code`` is the exit code of commands."""

    exit_code = 1


class UsageError(BatchkvError):
    """An argument, a setting or the input is wrong. Nothing was changed."""

    exit_code = 2


class InputFileError(UsageError):
    """The input file as a whole cannot be read."""


class NotFoundError(UsageError):
    """There is no batch or job with this id."""


class ExpiredError(NotFoundError):
    """The batch and its results have expired."""


class DiskError(BatchkvError):
    """A disk is full. Nothing is lost, and the same command goes on when there is room."""

    exit_code = 4


class FullHomeError(DiskError):
    """The disk of the home folder is full, so the embedded server refuses writes."""


class ServerError(BatchkvError):
    """Redis cannot be reached, refuses the operation, is full or read-only."""

    exit_code = 3


class RefusedError(ServerError):
    """The user of the URL has no right to the operation. Nothing was changed."""


class AwayError(ServerError):
    """A gateway cannot be reached now. The same request may succeed later."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class WireError(BatchkvError):
    """Bytes from Redis were not written by batchkv."""
