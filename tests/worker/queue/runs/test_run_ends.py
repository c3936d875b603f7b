"""What of a prompt other workers may have: what the ends of a run share with it."""

from __future__ import annotations

from dataclasses import replace

from batchkv_producer.wire.job import Request, encode_job
from batchkv_producer.wire.transitions import JobLease, Pulled
from batchkv_worker.events import Work
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.runs.pace import Crowd, Pace
from batchkv_worker.queue.runs.run_ends import RunEnds, slowdown

REQUEST = Request("c", "completion", prompt="")


def request(text: str) -> Request:
    return replace(REQUEST, prompt=text)


def pulled(text: str, data: bytes | None = None) -> Pulled:
    encoded = encode_job(request(text)) if data is None else data
    return Pulled(JobLease(text, "e"), encoded, shared_bytes=100)


def test_a_group_inside_a_run_is_nowhere_else() -> None:
    """Groups a, b and c in one run: a and c may go on before and after it, b cannot."""
    ends = RunEnds([pulled(text) for text in ("aaa1", "aaa2", "bbb1", "bbb2", "ccc1", "ccc2")])
    found = {text: ends.elsewhere_bytes(request(text), 3) for text in ("aaa2", "bbb1", "ccc1")}
    assert found == {"aaa2": 3, "bbb1": 0, "ccc1": 3}


def test_a_group_that_is_cut_goes_on_elsewhere() -> None:
    """Another worker gets the end of a run, and with it rows of a group that stays in part."""
    held = InFlight("fake", "w")
    held.note_crowd(Crowd(Pace()), 2)
    jobs = [replace(pulled(text), shared_bytes=3) for text in ("aaa1", "bbb1", "bbb2", "ccc1")]
    held.hold(jobs)
    given = [job.lease for job in jobs[2:]]
    held.note_returned(given)
    for lease in given:
        held.drop(lease.job_id)
    works = held.start(9)
    assert [work.elsewhere_bytes for work in works if isinstance(work, Work)] == [3, 3]


def test_no_more_than_the_batch_shares() -> None:
    """The producer's number is the most, and where it is not known nothing is."""
    ends = RunEnds([pulled("aaaa1"), pulled("aaab1")])
    assert ends.elsewhere_bytes(request("aaaa1"), 2) == 2
    assert ends.elsewhere_bytes(request("aaaa1"), 0) == 0
    assert ends.elsewhere_bytes(request("aaaa1"), None) is None


def test_a_job_that_cannot_be_read_tells_nothing() -> None:
    """Then all that the batch shares may be elsewhere."""
    ends = RunEnds([pulled("x", b"garbage"), pulled("b")])
    assert ends.elsewhere_bytes(request("bbb"), 3) == 3


def test_the_slowest_of_the_others_counts() -> None:
    """A faster worker is no reason to write less; one that is away does not count."""
    own = Pace(speed=100.0)
    assert slowdown(Crowd(own)) == 1.0
    assert slowdown(Crowd(own, (Pace(speed=400.0),))) == 1.0
    assert slowdown(Crowd(own, (Pace(speed=25.0), Pace(speed=50.0)))) == 4.0
    assert slowdown(Crowd(own, (Pace(speed=25.0, is_away=True),))) == 1.0
    assert slowdown(Crowd(Pace(), (), 2)) == 1.0
