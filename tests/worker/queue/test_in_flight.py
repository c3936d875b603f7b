"""The rows in flight: admitted, ended, expired, canceled; faults of their data are rows too."""

from __future__ import annotations

import json
import pickle
import time
import zlib
from dataclasses import replace

import pytest

from batchkv_producer.wire import job
from batchkv_producer.wire.job import ErrorCode, Request, Usage, decode_result, encode_job
from batchkv_producer.wire.transitions import Ending, Held, Pulled
from batchkv_worker.events import Completed, Rejected, Work
from batchkv_worker.queue.in_flight import Flights

REQUEST = Request(custom_id="c1", endpoint="chat", messages=[{"role": "user", "content": "hi"}])


class Bomb:
    """Tells when it is unpickled."""

    exploded = False

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (setattr, (Bomb, "exploded", True))


def pulled(job_id: str = "j", data: bytes | None = None, timeout_seconds: int = 0) -> Pulled:
    return Pulled(
        Held(job_id, "e"), encode_job(REQUEST) if data is None else data, 0, timeout_seconds
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
    flights = Flights("m", "w")
    ending = flights.admit(pulled(data=data))
    assert isinstance(ending, Ending)
    result = decode_result(ending.result)
    assert (ending.outcome, result.outcome) == ("failed", "failed")
    assert result.error is not None
    assert result.error[0] == ErrorCode.INVALID_REQUEST
    assert says in result.error[1]
    assert len(flights) == 0
    assert not Bomb.exploded


def test_what_started_later_is_told_until_somebody_heard() -> None:
    """Rows that had begun when they were pulled need not be told, nor those that have left."""
    flights = Flights("m", "w")
    flights.hold([pulled("known")])
    flights.hold([replace(pulled(job_id), has_begun=False) for job_id in "abcd"])
    flights.hold([replace(pulled("bad", b""), has_begun=False)])
    assert flights.untold == []
    flights.start(3)
    assert flights.untold == flights.untold == [Held("a", "e"), Held("b", "e")]
    flights.drop("a")
    flights.start(3)
    heard = flights.untold[:1]
    flights.note_told(heard)
    assert (heard, flights.untold) == ([Held("b", "e")], [Held("c", "e"), Held("d", "e")])
    flights.end(Rejected("c", "engine_error", "no"))
    flights.cancel(["d"])
    assert flights.untold == []


def test_an_answer_too_large_to_be_read_back_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What no reader would take is not stored: the row says what to ask less of."""
    flights = Flights("m", "w")
    flights.admit(pulled())
    monkeypatch.setattr(job, "MAX_RESULT_BYTES", 1000)
    ending = flights.end(Completed("j", "x" * 2000, "stop", Usage(1, 2, 0)))
    assert ending is not None and ending.outcome == "failed"
    error = decode_result(ending.result).error
    assert error is not None and error[0] == ErrorCode.ENGINE_ERROR
    assert "larger than 1000 bytes: ask for fewer tokens or logprobs" in error[1]


def test_a_finished_row_carries_everything() -> None:
    """Text, usage, model, worker and time reach the result, the usage the counters too."""
    flights = Flights("model", "worker")
    assert flights.admit(pulled()) == Work("j", REQUEST)
    ending = flights.end(Completed("j", "text", "stop", Usage(5, 3, 2)))
    assert ending is not None
    result = decode_result(ending.result)
    assert (result.custom_id, result.text, result.outcome) == ("c1", "text", "ok")
    assert (result.model, result.worker, result.usage) == ("model", "worker", Usage(5, 3, 2))
    assert abs(result.created - time.time()) < 5
    assert (ending.prompt_tokens, ending.completion_tokens, ending.cached_tokens) == (5, 3, 2)
    assert flights.end(Completed("j", "again", "stop", Usage())) is None


def test_a_rejected_row_keeps_its_code() -> None:
    """What the engine refuses is a failed row with the engine's code and message."""
    flights = Flights("m", "w")
    flights.admit(pulled())
    ending = flights.end(Rejected("j", ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long"))
    assert ending is not None
    assert decode_result(ending.result).error == ("context_length_exceeded", "too long")


def test_a_deadline_counts_from_admission() -> None:
    """A row past its timeout fails with the code timeout; one without a timeout never does."""
    flights = Flights("m", "w")
    flights.admit(pulled("timed", timeout_seconds=10))
    flights.admit(pulled("free"))
    now = time.monotonic()
    assert 9 < flights.next_deadline - now <= 10
    assert flights.expire(now + 9) == []
    [ending] = flights.expire(now + 11)
    assert decode_result(ending.result).error == ("timeout", "not done in 10 s")
    assert [lease.job_id for lease in flights.leases] == ["free"]


def test_cancel_drops_only_what_is_held() -> None:
    """Unknown ids are ignored; a held row gets a canceled result."""
    flights = Flights("m", "w")
    flights.admit(pulled())
    [(job_id, result)] = flights.cancel(["other", "j"])
    assert job_id == "j"
    assert decode_result(result).outcome == "canceled"
    assert len(flights) == 0


def test_a_row_waits_as_it_came_until_it_starts() -> None:
    """The backlog is held and renewed; time runs, and data is read, from the start on."""
    flights = Flights("m", "w")
    flights.hold([pulled("a", timeout_seconds=10), pulled("b", b"garbage"), pulled("c")])
    assert (len(flights), flights.num_started, flights.num_waiting) == (3, 0, 3)
    assert flights.next_deadline == float("inf")
    assert [lease.job_id for lease in flights.leases] == ["a", "b", "c"]
    assert flights.expire(time.monotonic() + 1000) == []
    work, ending = flights.start(2)
    assert work == Work("a", REQUEST)
    assert isinstance(ending, Ending)
    assert ending.outcome == "failed"
    assert flights.next_deadline - time.monotonic() > 9
    assert [lease.job_id for lease in flights.started] == ["a"]
    assert [lease.job_id for lease in flights.backlog] == ["c"]
    assert flights.start(5) == [Work("c", REQUEST)]


def test_what_waits_can_be_dropped_and_canceled() -> None:
    """A row of the backlog is told to be canceled by its own id, whatever its data."""
    flights = Flights("m", "w")
    flights.hold([pulled("a"), pulled("b"), pulled("c", b"garbage")])
    assert flights.drop("a")
    assert not flights.drop("a")
    (first, result), (second, other) = flights.cancel(["b", "c"])
    assert (first, second) == ("b", "c")
    assert decode_result(result).custom_id == "c1"
    assert decode_result(result).error == ("canceled", "stopped before it was started")
    assert decode_result(other).outcome == "canceled"
    assert len(flights) == 0
