"""The rows in flight: admitted, ended, expired, canceled; faults of their data are rows too."""

from __future__ import annotations

import json
import pickle
import time
import zlib
from dataclasses import replace

import pytest

from batchkv_producer.wire import job
from batchkv_producer.wire.choice import Choice
from batchkv_producer.wire.job import (
    ErrorCode,
    Request,
    SamplingParams,
    Usage,
    decode_result,
    encode_job,
)
from batchkv_producer.wire.transitions import JobLease, JobResult, Pulled
from batchkv_worker.events import Completed, Rejected, Work
from batchkv_worker.queue.in_flight import InFlight

REQUEST = Request(custom_id="c1", endpoint="chat", messages=[{"role": "user", "content": "hi"}])


class Bomb:
    """Tells when it is unpickled."""

    exploded = False

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (setattr, (Bomb, "exploded", True))


def pulled(job_id: str = "j", data: bytes | None = None, timeout_seconds: int = 0) -> Pulled:
    return Pulled(
        JobLease(job_id, "e"), encode_job(REQUEST) if data is None else data, 0, timeout_seconds
    )


def call(*parts: object) -> bytes:
    return zlib.compress(json.dumps(parts).encode())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "missing or larger"),
        (b"garbage", "not compressed"),
        (zlib.compress(pickle.dumps(("batchkv.generate", None, (Bomb(),), {}))), "not JSON"),
        (pickle.dumps(Bomb()), "not compressed"),
        (call("os.system", None, ["true"], {}), "only 'batchkv.generate'"),
        (call("batchkv.generate", None, [{"custom_id": "x", "endpoint": "chat"}], {}), "prompt"),
        (call("batchkv.generate", None, [], {}), "arguments"),
        (zlib.compress(b"[" * 100_000), "not JSON"),
        (encode_job(REQUEST)[:-3], "cut short"),
    ],
)
def test_a_payload_that_is_not_ours_is_a_failed_row(data: bytes, says: str) -> None:
    """Nothing of it is executed; the row fails with invalid_request and holds no slot."""
    in_flight = InFlight("m", "w")
    ending = in_flight.admit(pulled(data=data))
    assert isinstance(ending, JobResult)
    result = decode_result(ending.result)
    assert (ending.outcome, result.outcome) == ("failed", "failed")
    assert result.error is not None
    assert result.error[0] == ErrorCode.INVALID_REQUEST
    assert says in result.error[1]
    assert len(in_flight) == 0
    assert not Bomb.exploded


def test_what_started_later_is_told_until_somebody_heard() -> None:
    """Rows that had begun when they were pulled need not be told, nor those that have left."""
    in_flight = InFlight("m", "w")
    in_flight.hold([pulled("known")])
    in_flight.hold([replace(pulled(job_id), has_begun=False) for job_id in "abcd"])
    in_flight.hold([replace(pulled("bad", b""), has_begun=False)])
    assert in_flight.unreported == []
    in_flight.start(3)
    assert in_flight.unreported == in_flight.unreported == [JobLease("a", "e"), JobLease("b", "e")]
    in_flight.drop("a")
    in_flight.start(3)
    heard = in_flight.unreported[:1]
    in_flight.note_reported(heard)
    assert (heard, in_flight.unreported) == (
        [JobLease("b", "e")],
        [JobLease("c", "e"), JobLease("d", "e")],
    )
    in_flight.end(Rejected("c", "engine_error", "no"))
    in_flight.cancel(["d"])
    assert in_flight.unreported == []


def test_an_answer_too_large_to_be_read_back_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What no reader would take is not stored: the row says what to ask less of."""
    in_flight = InFlight("m", "w")
    in_flight.admit(pulled())
    monkeypatch.setattr(job, "MAX_RESULT_BYTES", 1000)
    ending = in_flight.end(Completed("j", "x" * 2000, "stop", Usage(1, 2, 0)))
    assert ending is not None and ending.outcome == "failed"
    error = decode_result(ending.result).error
    assert error is not None and error[0] == ErrorCode.ENGINE_ERROR
    assert "larger than 1000 bytes: ask for fewer tokens, choices or logprobs" in error[1]


def test_a_finished_row_carries_everything() -> None:
    """Text, usage, model, worker and time reach the result, the usage the counters too."""
    in_flight = InFlight("model", "worker")
    assert in_flight.admit(pulled()) == Work("j", REQUEST)
    ending = in_flight.end(Completed("j", "text", "stop", Usage(5, 3, 2)))
    assert ending is not None
    result = decode_result(ending.result)
    assert (result.custom_id, result.text, result.outcome) == ("c1", "text", "ok")
    assert (result.model, result.worker, result.usage) == ("model", "worker", Usage(5, 3, 2))
    assert abs(result.created - time.time()) < 5
    assert (ending.prompt_tokens, ending.completion_tokens, ending.cached_tokens) == (5, 3, 2)
    assert in_flight.end(Completed("j", "again", "stop", Usage())) is None


def test_a_rejected_row_keeps_its_code() -> None:
    """What the engine refuses is a failed row with the engine's code and message."""
    in_flight = InFlight("m", "w")
    in_flight.admit(pulled())
    ending = in_flight.end(Rejected("j", ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long"))
    assert ending is not None
    assert decode_result(ending.result).error == ("context_length_exceeded", "too long")


def test_a_deadline_counts_from_admission() -> None:
    """A row past its timeout fails with the code timeout; one without a timeout never does."""
    in_flight = InFlight("m", "w")
    in_flight.admit(pulled("timed", timeout_seconds=10))
    in_flight.admit(pulled("free"))
    now = time.monotonic()
    assert 9 < in_flight.next_deadline - now <= 10
    assert in_flight.expire(now + 9) == []
    [ending] = in_flight.expire(now + 11)
    assert decode_result(ending.result).error == ("timeout", "not done in 10 s")
    assert [lease.job_id for lease in in_flight.leases] == ["free"]


def test_cancel_drops_only_what_is_held() -> None:
    """Unknown ids are ignored; a held row gets a canceled result."""
    in_flight = InFlight("m", "w")
    in_flight.admit(pulled())
    [(job_id, result)] = in_flight.cancel(["other", "j"])
    assert job_id == "j"
    assert decode_result(result).outcome == "canceled"
    assert len(in_flight) == 0


def test_a_row_waits_as_it_came_until_it_starts() -> None:
    """The backlog is held and renewed; time runs, and data is read, from the start on."""
    in_flight = InFlight("m", "w")
    in_flight.hold([pulled("a", timeout_seconds=10), pulled("b", b"garbage"), pulled("c")])
    assert (len(in_flight), in_flight.num_started, in_flight.num_waiting) == (3, 0, 3)
    assert in_flight.next_deadline == float("inf")
    assert [lease.job_id for lease in in_flight.leases] == ["a", "b", "c"]
    assert in_flight.expire(time.monotonic() + 1000) == []
    work, ending = in_flight.start(2)
    assert work == Work("a", REQUEST)
    assert isinstance(ending, JobResult)
    assert ending.outcome == "failed"
    assert in_flight.next_deadline - time.monotonic() > 9
    assert [lease.job_id for lease in in_flight.started] == ["a"]
    assert [lease.job_id for lease in in_flight.backlog] == ["c"]
    assert in_flight.start(5) == [Work("c", REQUEST)]


def test_what_waits_can_be_dropped_and_canceled() -> None:
    """A row of the backlog is told to be canceled by its own id, whatever its data."""
    in_flight = InFlight("m", "w")
    in_flight.hold([pulled("a"), pulled("b"), pulled("c", b"garbage")])
    assert in_flight.drop("a")
    assert not in_flight.drop("a")
    (first, result), (second, other) = in_flight.cancel(["b", "c"])
    assert (first, second) == ("b", "c")
    assert decode_result(result).custom_id == "c1"
    assert decode_result(result).error == ("canceled", "stopped before it was started")
    assert decode_result(other).outcome == "canceled"
    assert len(in_flight) == 0


def test_choices_take_the_room_of_rows() -> None:
    """Rows are started until their choices fill the room. Equal choices need one slot."""
    in_flight = InFlight("m", "w")
    counts = {"a": (3, 1.0), "b": (5, None), "c": (2, 0.0), "d": (None, None), "e": (8, None)}
    for job_id, (count, temperature) in counts.items():
        params = SamplingParams(n=count, temperature=temperature)
        in_flight.hold([pulled(job_id, encode_job(replace(REQUEST, params=params)))])
    assert in_flight.choices == 1
    assert [work.num_choices for work in in_flight.start(4) if isinstance(work, Work)] == [3, 5]
    assert (in_flight.num_started, len(in_flight.started), in_flight.num_waiting) == (8, 2, 3)
    assert in_flight.choices == 4
    assert [work.num_wanted for work in in_flight.start(2) if isinstance(work, Work)] == [2, 1]
    in_flight.drop("a")
    assert (in_flight.num_started, in_flight.start(0)) == (7, [])


def test_a_hostile_number_of_choices_starts_no_more_rows() -> None:
    """The engine refuses such a row; until then it takes room like any other."""
    in_flight = InFlight("m", "w")
    for job_id, count in (("a", -9), ("b", 10**12), ("c", 2)):
        job_data = encode_job(replace(REQUEST, params=SamplingParams(n=count)))
        in_flight.hold([pulled(job_id, job_data)])
    assert len(in_flight.start(1)) == 1 and in_flight.num_started == 1
    assert len(in_flight.start(1)) == 1 and in_flight.num_waiting == 1


def test_all_choices_are_stored_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result has every choice, and is cut if one is. One that is too large is an error."""
    in_flight = InFlight("m", "w")
    for job_id in "ab":
        in_flight.admit(pulled(job_id))
    more = (Choice("y", "length"), Choice("z", "stop"))
    ending = in_flight.end(Completed("a", "x", "stop", Usage(3, 9, 0), more=more))
    assert ending is not None and ending.is_cut and ending.completion_tokens == 9
    stored = decode_result(ending.result)
    assert [choice.text for choice in stored.choices] == ["x", "y", "z"]
    monkeypatch.setattr(job, "MAX_RESULT_BYTES", 1000)
    huge = (Choice("y" * 500, "stop"),) * 2
    failed = in_flight.end(Completed("b", "x", "stop", Usage(3, 9, 0), more=huge))
    assert failed is not None and failed.outcome == "failed"
    assert decode_result(failed.result).error == (
        ErrorCode.ENGINE_ERROR,
        "the result is larger than 1000 bytes: ask for fewer tokens, choices or logprobs",
    )
