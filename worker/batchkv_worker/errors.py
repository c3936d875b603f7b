"""The worker's error tree, and the exit codes of a worker process.

    BatchkvError
    └── WorkerError              a fault in the configuration, before any job; exit code 2
        ├── SettingsError        a variable or a flag has an invalid value
        ├── ModelError           the model is unknown, incomplete or not supported
        ├── ModelChangedError    its files changed while they were loaded; exit code 72
        └── QueueMismatchError   the worker's queue belongs to another model

==========  =====================================================================================
exit code   meaning
==========  =====================================================================================
0           asked to stop, or nothing left to do (``--burst``, ``--max-jobs``, ``--max-idle-time``)
2           a fault in the configuration: a restart will not help
3           Redis cannot be reached at the start, or refuses the worker
70          the engine died; its rows went back to the queue
71          the engine hung; counts and stacks are in the log; its rows went back to the queue
72          the model's files changed since they were loaded: start the worker again
73          the parent ended and the worker could not end in time: its leases bring its jobs back
74          the GPU failed twice within a minute or at start; its rows went back, and none is blamed
==========  =====================================================================================
"""

from __future__ import annotations

from batchkv_producer.errors import BatchkvError

EXIT_ENGINE_DIED = 70
EXIT_ENGINE_HUNG = 71
EXIT_MODEL_CHANGED = 72
EXIT_ORPHANED = 73
EXIT_DEVICE_FAULT = 74


class WorkerError(BatchkvError):
    """The worker cannot start with its configuration; ``str()`` is one line for people."""

    exit_code = 2


class SettingsError(WorkerError):
    """A setting has an invalid value; the message names the variable or the flag."""


class ModelError(WorkerError):
    """The model is unknown, incomplete, or of a kind that is not supported."""


class ModelChangedError(WorkerError):
    """The model's files changed while they were loaded, so the loaded weights are unknown."""

    exit_code = EXIT_MODEL_CHANGED


class QueueMismatchError(WorkerError):
    """The worker should serve another queue than that of its model."""
