"""The batch that a request names, if its caller may see it."""

from __future__ import annotations

from starlette.requests import Request

from batchkv_gateway.batches.record import OPEN
from batchkv_gateway.kept_facts import stored_facts
from batchkv_gateway.native.file_rows import FileRows
from batchkv_gateway.native.owners import Found, Owners
from batchkv_gateway.parts import Parts
from batchkv_producer.client import BatchStatus, Client
from batchkv_producer.errors import NotFoundError
from batchkv_producer.report.facts import Facts


class Visible:
    """Finds the batches that requests name."""

    def __init__(self, parts: Parts) -> None:
        self._connection, self._files = parts.connection, parts.files
        self.client = Client(parts.connection)
        self.owners = Owners(parts.connection)

    def find(self, request: Request) -> Found:
        """The batch of a request's path. Raises NotFoundError."""
        return self.owners.find(request.state.caller, request.path_params["batch_id"])

    def queued(self, request: Request) -> Found:
        """A batch with rows in the queue. Raises NotFoundError if they have left it."""
        found = self.find(request)
        if self.status(found) is None:
            raise NotFoundError(
                f"batch {_name(found)} has no rows in the queue: they are not there yet, or its "
                "files have them"
            )
        return found

    def in_files(self, found: Found) -> FileRows | None:
        """The rows of a batch of OpenAI's API that are not in the queue. Else None.

        They are in its files, or there are none yet.
        """
        if found.openai is None or self.status(found) is not None:
            return None
        record = self.owners.record(found.openai.batch_id)  # it may have ended meanwhile
        return FileRows(self._files, record or found.openai)

    def results_in_files(self, found: Found) -> FileRows | None:
        """The same for their results. Raises NotFoundError if there are none yet."""
        files = self.in_files(found)
        if files is not None and found.openai is not None:
            record = self.owners.record(found.openai.batch_id) or found.openai
            if record.status in OPEN:
                raise NotFoundError(
                    f"batch {_name(found)} is {record.status.replace('_', ' ')}: it has no results "
                    "at this moment. Ask again"
                )
        return files

    def ended(self, request: Request) -> FileRows | None:
        """``results_in_files`` of the batch of a request's path."""
        return self.results_in_files(self.find(request))

    def kept_facts(self, found: Found) -> Facts | None:
        """The facts of a report that were kept when the rows of the batch left the queue."""
        if found.openai is None:
            return None
        return stored_facts(self._connection, found.openai.batch_id)

    def batch(self, request: Request) -> BatchStatus:
        """The status of the batch of a request's path. Raises NotFoundError."""
        found = self.queued(request)
        return self.client.status(found.batch_id)

    def status(self, found: Found) -> BatchStatus | None:
        """The batch in the queue. None for one of OpenAI's API whose rows are not there."""
        try:
            return self.client.status(found.batch_id)
        except NotFoundError:
            if found.openai is None:
                raise
            return None


def _name(found: Found) -> str:
    return found.openai.batch_id if found.openai else found.batch_id


def no_facts(found: Found) -> NotFoundError:
    """The error for a report of a batch whose rows have left the queue without one."""
    return NotFoundError(
        f"the rows of batch {found.batch_id} have left the queue, and there are no facts of them"
    )
