"""``/v1/batches``: create, read, list, cancel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.batches.driver import Driver
from batchkv_gateway.batches.record import IN_PROGRESS, BatchRecord
from batchkv_gateway.batches.store import AskedBatch, Batches
from batchkv_gateway.errors import invalid, unknown
from batchkv_gateway.files.form import checked_expiry
from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.http.asked import json_object, page_of
from batchkv_gateway.http.together import Together
from batchkv_gateway.ids import BATCH
from batchkv_gateway.pages import as_list
from batchkv_producer.intake.body import ENDPOINTS
from batchkv_producer.wire.batch_options import seconds_of

FIELDS = ("completion_window", "endpoint", "input_file_id", "metadata", "output_expires_after")
VALIDATION_HEADER = "x-batchkv-validation"
VALIDATIONS = ("strict", "per-row")
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 3600, 7 * 86_400
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
DEFAULT_PAGE, MAX_PAGE = 20, 100


class BatchRoutes:
    """The handlers."""

    def __init__(self, batches: Batches, driver: Driver) -> None:
        self._batches, self._driver = batches, driver
        self._polls = Together[tuple[str, str], Response | None](self._poll)

    def routes(self) -> list[Route]:
        """The routes of this room."""
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list_batches, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.one, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Make a batch. The same request again finds the same batch."""
        body = await json_object(request, FIELDS)
        validation = request.headers.get(VALIDATION_HEADER, VALIDATIONS[0]).strip().lower()
        asked = asked_batch(body, validation)
        caller = request.state.caller
        record = await run_in_threadpool(self._batches.create, caller, asked)
        self._driver.nudge()
        return await run_in_threadpool(self._answer, record)

    async def one(self, request: Request) -> Response:
        """One batch. Clients poll it, so batches that are asked for together are read together."""
        batch_id = _id(request)
        answer = await self._polls.get((request.state.owner, batch_id))
        if answer is None:
            raise unknown("batch", batch_id)
        return answer

    def list_batches(self, request: Request) -> Response:
        """A page of batches, the newest first."""
        asked = page_of(
            request.query_params, BATCH, default=DEFAULT_PAGE, most=MAX_PAGE, has_order=False
        )
        found, has_more = self._batches.page(request.state.owner, asked)
        return json_answer(as_list(self._batches.objects(found), has_more))

    def cancel(self, request: Request) -> Response:
        """Begin to cancel a batch."""
        record = self._batches.cancel(request.state.owner, _id(request))
        self._driver.look_at(record.batch_id)
        return self._answer(record)

    def _poll(self, asked: Sequence[tuple[str, str]]) -> Sequence[Response | None]:
        """The answers about batches of these owners and ids; None for an unknown one."""
        records = self._batches.find_all(asked)
        objects = iter(self._batches.objects([record for record in records if record]))
        answers = list[Response | None]()
        for record in records:
            found = next(objects) if record else None
            if found and has_ended(found):
                self._driver.look_soon(found["id"])
            answers.append(json_answer(found) if found else None)
        return answers

    def _answer(self, record: BatchRecord) -> Response:
        return json_answer(self._batches.objects([record])[0])


def has_ended(found: dict[str, Any]) -> bool:
    """Whether all rows of a batch have ended, and its files are not written yet."""
    counts = found["request_counts"]
    num_ended = counts["completed"] + counts["failed"]
    return bool(found["status"] == IN_PROGRESS and num_ended == counts["total"])


def _id(request: Request) -> str:
    found: str = request.path_params["batch_id"]
    return found


def asked_batch(body: dict[str, Any], validation: str) -> AskedBatch:
    """The batch that a body asks for. Raises ApiError for a wrong field."""
    if validation not in VALIDATIONS:
        raise invalid(f"{VALIDATION_HEADER} must be {' or '.join(VALIDATIONS)}", VALIDATION_HEADER)
    texts = {name: _text(body, name) for name in FIELDS[:3]}
    if texts["endpoint"] not in ENDPOINTS:
        raise invalid(f"endpoint must be {' or '.join(ENDPOINTS)}", "endpoint")
    try:
        seconds = seconds_of(texts["completion_window"])
    except ValueError:
        seconds = 0
    if not MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS:
        raise invalid("completion_window must be 1h to 7d, like 24h", "completion_window")
    return AskedBatch(
        endpoint=texts["endpoint"],
        input_file_id=texts["input_file_id"],
        completion_window=texts["completion_window"],
        window_seconds=seconds,
        metadata=json.dumps(_metadata(body.get("metadata", {})), sort_keys=True),
        validation=validation,
        output_seconds=_output_seconds(body.get("output_expires_after")),
    )


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        raise invalid(f"{name} is missing", name, "missing_required_parameter")
    if not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
        raise invalid(f"{name} must be a text", name)
    return value


def _metadata(value: object) -> dict[str, str]:
    """Checked metadata: texts by name."""
    is_right = isinstance(value, dict) and len(value) <= MAX_PAIRS
    pairs = value.items() if isinstance(value, dict) else ()
    if not is_right or not all(
        len(key) <= MAX_KEY_CHARS and isinstance(text, str) and len(text) <= MAX_VALUE_CHARS
        for key, text in pairs
    ):
        raise invalid(
            f"metadata must have at most {MAX_PAIRS} texts of {MAX_VALUE_CHARS} characters under "
            f"names of {MAX_KEY_CHARS}",
            "metadata",
        )
    return dict(pairs)


def _output_seconds(value: object) -> int:
    """The seconds after which the output files expire; 0 is the gateway's default."""
    if value is None:
        return 0
    if not isinstance(value, dict) or value.keys() - {"anchor", "seconds"}:
        raise invalid("output_expires_after has an anchor and seconds", "output_expires_after")
    return checked_expiry(value.get("anchor"), value.get("seconds"), "output_expires_after")
