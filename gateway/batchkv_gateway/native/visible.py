"""The batch that a request names, if its caller may see it."""

from __future__ import annotations

from starlette.requests import Request

from batchkv_gateway.native.owners import Found, Owners
from batchkv_gateway.parts import Parts
from batchkv_producer.client import BatchStatus, Client
from batchkv_producer.errors import NotFoundError


class Visible:
    """Finds the batches that requests name."""

    def __init__(self, parts: Parts) -> None:
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
                f"the rows of batch {found.batch_id} have left the queue: its files have them"
            )
        return found

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
