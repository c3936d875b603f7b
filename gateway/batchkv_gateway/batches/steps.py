"""The steps of a batch, each from one state to the next.

::

    validating -> failed | in_progress -> finalizing -> completed | expired
    validating, in_progress -> cancelling -> cancelled

Each step can be repeated from its beginning. A change of state is one script, which does nothing if
the state is another one meanwhile. So any gateway can go on with a batch after a kill.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.batches import record as states
from batchkv_gateway.batches.check import LineError, check_input
from batchkv_gateway.batches.outputs import Outputs
from batchkv_gateway.batches.record import BatchRecord, read_record, usage_of
from batchkv_gateway.files.folder import Incoming
from batchkv_gateway.files.records import OUTPUT, Files
from batchkv_gateway.ids import FILE, new_id
from batchkv_gateway.kept_facts import store_facts
from batchkv_gateway.scripts import Command, guarded
from batchkv_gateway.settings import GatewaySettings
from batchkv_gateway.webhooks.events import commands as commands_of
from batchkv_gateway.webhooks.events import ended
from batchkv_gateway.webhooks.targets import checked_targets
from batchkv_producer.errors import BatchkvError, NotFoundError, UsageError
from batchkv_producer.intake.body import ENDPOINTS
from batchkv_producer.intake.model_vote import NoSingleModelError
from batchkv_producer.intake.source import Inputs
from batchkv_producer.manage.cancel_retry import cancel_batch
from batchkv_producer.manage.forget import forget_batch
from batchkv_producer.manage.reconcile import Reconciler
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.report.reading import read_facts
from batchkv_producer.submit import submission
from batchkv_producer.wire.batch_options import BatchOptions, Deadline

log = logging.getLogger(__name__)

SOON_SECONDS = 2
ELSEWHERE_SECONDS = 60.0  # in which a gateway that has the batch's input can work on it


class _WithdrawnError(Exception):
    """The batch was cancelled before its submit began."""


class Steps:
    """Advances batches. All of it may run in several threads and processes."""

    def __init__(self, connection: Redis, files: Files, settings: GatewaySettings) -> None:
        self._connection, self._files, self._settings = connection, files, settings
        self._reconciler = Reconciler(connection)
        self._targets = [target.name for target in checked_targets(settings.webhooks)]
        self._missing: dict[str, float] = {}  # batch without its input here -> since when

    def advance(self, batch_id: str) -> bool:
        """Do a batch's next step. Returns whether another one can follow at once."""
        record = self._read(batch_id)
        if record is None:
            self._connection.zrem(redis_keys.OPEN, batch_id)
            return False
        step = {
            states.VALIDATING: self._validate,
            states.IN_PROGRESS: self._follow,
            states.FINALIZING: self._finalize,
            states.CANCELLING: self._cancel,
        }.get(record.status)
        if step is None or self._is_elsewhere(record):
            return False
        return step(record)

    def fail(self, batch_id: str, errors: tuple[LineError, ...]) -> None:
        """End a batch without files."""
        record = self._read(batch_id)
        if record is not None:
            self._end(record, states.FAILED, {"errors": json.dumps([asdict(e) for e in errors])})

    def forget(self, batch_id: str) -> None:
        """Delete the rows of an ended batch from the queue. The facts of its report stay."""
        raw: Any = self._connection.hget(redis_keys.SPENT, batch_id)
        if raw is None:
            return
        queued_id = raw.decode("utf-8", "replace")
        is_deleted = not self._connection.exists(redis_keys.batch(batch_id))
        if not is_deleted and not self._connection.exists(redis_keys.facts(batch_id)):
            try:
                facts = read_facts(self._connection, queued_id)
                seconds = self._settings.keep_files_seconds
                store_facts(self._connection, batch_id, facts, seconds)
            except BatchkvError as fault:  # it is half deleted, or another program wrote results
                log.warning("batch %s will have no report: %s", batch_id, fault)
        with suppress(NotFoundError):
            forget_batch(self._connection, queued_id)
        self._connection.hdel(redis_keys.SPENT, batch_id)

    def _read(self, batch_id: str) -> BatchRecord | None:
        stored: Any = self._connection.hgetall(redis_keys.batch(batch_id))
        return read_record(batch_id, stored)

    def _is_elsewhere(self, record: BatchRecord) -> bool:
        """Whether another gateway may have the folder with the input, and so does the work."""
        if self._files.folder.content(record.content).is_file():
            self._missing.pop(record.batch_id, None)
            return False
        now = time.monotonic()
        return now - self._missing.setdefault(record.batch_id, now) < ELSEWHERE_SECONDS

    def _validate(self, record: BatchRecord) -> bool:
        path = self._files.folder.content(record.content)
        if not path.is_file():
            errors: tuple[LineError, ...]
            message = "the content of the input file is gone: upload it again"
            errors = (LineError("file_lost", message),)
        else:
            most = self._settings.max_rows
            errors = check_input(path, record.endpoint, most, is_strict=record.is_strict)
        if errors:
            self.fail(record.batch_id, errors)
            return False
        try:
            self._submit(record)
        except _WithdrawnError:
            return True
        except NoSingleModelError as fault:
            code = "mismatched_model" if fault.line else "missing_required_parameter"
            self.fail(record.batch_id, (LineError(code, fault.for_api, fault.line, "body.model"),))
            return False
        except UsageError as fault:
            self.fail(record.batch_id, (LineError("invalid_request", str(fault)),))
            return False
        self._move(record, (states.VALIDATING,), states.IN_PROGRESS)
        return True

    def _submit(self, record: BatchRecord) -> None:
        """Queue the rows, or the rest of them."""
        is_late = record.expires <= time.time() + SOON_SECONDS
        deadline = Deadline(in_seconds=SOON_SECONDS) if is_late else Deadline(at=record.expires)

        def identified(queued_id: str, model: str, _: frozenset[str]) -> None:
            commands: list[Command] = [
                ("hset", self._key(record), "queued_id", queued_id, "model", model),
                ("hset", redis_keys.OWNERS, queued_id, f"{record.owner} {record.batch_id}"),
            ]
            expected = (states.VALIDATING, states.CANCELLING if record.queued_id else "")
            if guarded(self._connection, self._key(record), "status", expected, commands):
                raise _WithdrawnError

        submission.submit(
            self._connection,
            Inputs.of(self._files.folder.content(record.content), read_as="jsonl"),
            name=record.filename,
            options=BatchOptions(expires=deadline),
            on_identified=identified,
            identity=(b"gateway", record.batch_id.encode()),
            endpoint=ENDPOINTS[record.endpoint],
            cache_salt=record.cache_salt or None,
        )

    def _follow(self, record: BatchRecord) -> bool:
        queued = self._queued(record)
        if queued is None:
            message = "the batch was deleted from the queue by another tool"
            self.fail(record.batch_id, (LineError("batch_lost", message),))
            return False
        return queued.is_done and self._begin_files(record, states.FINALIZING)

    def _cancel(self, record: BatchRecord) -> bool:
        if not record.queued_id:
            self._end(record, states.CANCELLED, {})
            return False
        queued = self._queued(record)
        if queued is None or not queued.is_submitted:
            self._submit(record)
            queued = self._queued(record)
        if queued is not None and not queued.is_done:
            cancel_batch(self._connection, queued)
            queued = self._queued(record)
        if queued is None or not queued.is_done:
            return False
        if not record.output_id:
            return self._begin_files(record, states.CANCELLING)
        return self._finalize(record)

    def _queued(self, record: BatchRecord) -> BatchStatus | None:
        try:
            return self._reconciler.reconcile_id(record.queued_id)
        except NotFoundError:
            return None

    def _begin_files(self, record: BatchRecord, status: str) -> bool:
        """Choose the ids of the files. Whoever writes the files uses these."""
        ids: dict[str, str | int] = {"output_id": new_id(FILE), "error_id": new_id(FILE)}
        self._move(record, (record.status,), status, ids)
        return True

    def _finalize(self, record: BatchRecord) -> bool:
        queued = self._queued(record)
        if queued is None:
            message = "the batch was deleted from the queue before its files were written"
            self.fail(record.batch_id, (LineError("batch_lost", message),))
            return False
        with closing(Outputs.begin(self._files.folder)) as outputs:
            outputs.write(self._connection, queued)
            status = states.EXPIRED if outputs.num_expired else states.COMPLETED
            if record.cancelling_at:
                status = states.CANCELLED
            used = outputs.usage
            usage = usage_of(used.prompt, used.cached, used.completion, used.reasoning)
            fields: dict[str, str | int] = {
                "total": queued.total,
                "completed": outputs.num_answers,
                "failed": outputs.num_errors,
                "canceled": queued.canceled,
                "cut": queued.cut,
                "usage": json.dumps(usage),
            }
            commands: list[Command] = []
            if outputs.num_answers:
                fields["output_file_id"] = record.output_id
                commands += self._publish(record, outputs.answers, record.output_id, "output")
            if outputs.num_errors:
                fields["error_file_id"] = record.error_id
                commands += self._publish(record, outputs.errors, record.error_id, "error")
            self._end(record, status, fields, commands)
        return False

    def _publish(
        self, record: BatchRecord, incoming: Incoming, file_id: str, kind: str
    ) -> list[Command]:
        seconds = record.output_seconds or self._settings.keep_files_seconds
        name = f"{record.batch_id}_{kind}.jsonl"
        made = self._files.publish(incoming, file_id, record.owner, name, OUTPUT, seconds)
        return made.commands()

    def _move(
        self,
        record: BatchRecord,
        expected: tuple[str, ...],
        status: str,
        fields: dict[str, str | int] | None = None,
    ) -> None:
        """Change the state, unless it is another one meanwhile."""
        times = {} if status == record.status else {f"{status}_at": int(time.time())}
        words = [w for pair in {"status": status, **times, **(fields or {})}.items() for w in pair]
        commands: list[Command] = [("hset", self._key(record), *words)]
        guarded(self._connection, self._key(record), "status", expected, commands)

    def _end(
        self,
        record: BatchRecord,
        status: str,
        fields: dict[str, str | int],
        commands: list[Command] | None = None,
    ) -> None:
        """End the batch, store its files and its event, and release its input, in one step."""
        now, batch_id = int(time.time()), record.batch_id
        values = {"status": status, f"{status}_at": now, **fields}
        words = [word for pair in values.items() for word in pair]
        found: list[Command] = [
            ("hset", self._key(record), *words),
            ("zrem", redis_keys.OPEN, batch_id),
            ("hdel", redis_keys.uses(record.input_file_id), batch_id),
            ("hdel", redis_keys.open_rows(record.owner), batch_id),
            ("zadd", redis_keys.ENDED, now + self._settings.keep_files_seconds, batch_id),
            *(commands or []),
        ]
        counts = {name: int(fields.get(name, 0)) for name in ("total", "completed", "failed")}
        found += commands_of(ended(batch_id, status, counts, now), self._targets)
        if record.queued_id and status != states.FAILED:  # else its rows may be all that is left
            found.append(("hset", redis_keys.SPENT, batch_id, record.queued_id))
        guarded(self._connection, self._key(record), "status", (record.status,), found)

    def _key(self, record: BatchRecord) -> str:
        return redis_keys.batch(record.batch_id)
