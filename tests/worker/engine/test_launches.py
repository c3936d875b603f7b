"""Steps are launched by the engine's thread, or by one beside it: the rows are the same."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine import chunk_size
from batchkv_worker.engine import engine as engines
from batchkv_worker.engine.decode_step import Step
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.tokens.sampling import FewTokens, sample
from batchkv_worker.events import Completed
from batchkv_worker.faults import graver
from batchkv_worker.kv.backends import launching, pacing
from batchkv_worker.kv.backends.contract import Pacing
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.launching import AtOnce, Beside, Launches, choose, share_stream
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.backends.pacing import LayersAhead
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.prefix.shared import outbox
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.engine.grammar import guided_rows
from worker.engine.schedule import test_admission as admission
from worker.engine.test_oom import ASKED, failing
from worker.kv.crowd import model_of, random_prompt
from worker.prefix import engines_on_store as stores

SECONDS = 60.0  # that a thread may take


@dataclass(frozen=True, eq=False)
class LikeCuda(GenericBackend):
    """A backend whose layers of chunks, too, are launched beside the building of others."""

    replays_steps: bool = True
    launches_beside: bool = True

    def pacing(self, launches: Launches) -> Pacing:
        return LayersAhead(launches)


GPU = LikeCuda()


def beside_others(run: Callable[[], Any]) -> Any:
    """What ``run`` returns, on a thread whose default stream any thread may use."""
    found: list[Any] = []

    def whole() -> None:
        share_stream()
        try:
            found.append(run())
        except BaseException as fault:  # noqa: BLE001 - raised again below
            found.append(fault)

    thread = threading.Thread(target=whole, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "it never ends"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def threads() -> list[str]:
    """Those that launch for somebody; one more may wait for the next engine."""
    left = [one._thread for one in launching._left]
    found = [thread for thread in threading.enumerate() if "launch" in thread.name]
    return [thread.name for thread in found if thread not in left]


def test_another_thread_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are there after a join, and the thread ends with ``close``."""
    by: list[str] = []
    streams: list[Any] = []
    real = mx.async_eval

    def noting(*arrays: Any) -> None:
        by.append(threading.current_thread().name)
        streams.append(mx.default_stream(mx.default_device()))
        real(*arrays)

    def run() -> list[float]:
        launches = choose(is_beside=True)
        assert isinstance(launches, Beside) and threads()
        monkeypatch.setattr(mx, "async_eval", noting)
        totals = []
        for number in range(20):
            array = mx.full((100,), number) @ mx.ones((100, 1))
            launches.start([array], array + 1)
            assert launches._given.empty(), "the other thread has not begun"
            after = (array + 2).sum()  # is built meanwhile
            launches.join()
            launches.join()  # there is nothing more to wait for
            totals.append(after.item())
        launches.close()
        assert all(one == mx.default_stream(mx.default_device()) for one in streams)
        return totals

    assert beside_others(run) == [100.0 * number + 2 for number in range(20)]
    assert by == ["batchkv-launch"] * 20 and not threads()


def test_one_thread_serves_engine_after_engine() -> None:
    """On the stream of each. MLX keeps its plans for a thread. No second one waits."""

    def run() -> tuple[Any, Any, float]:
        first, second = choose(is_beside=True), choose(is_beside=True)
        assert isinstance(first, Beside) and isinstance(second, Beside) and len(threads()) == 2
        threads_of = first._thread, second._thread
        for one in (first, second, first):
            one.close()
        assert not threads() and [one.is_alive() for one in threads_of] == [True, False]
        array = mx.full((100,), 3.0) @ mx.ones((100, 1))
        again = choose(is_beside=True)
        again.start(array)
        again.join()
        assert again is first and isinstance(again, Beside)
        streams, device = list[Any](), mx.default_device()
        again._given.put(lambda: streams.append(mx.default_stream(device)))
        again.end_warm_up()
        own = mx.default_stream(device)
        assert [again._stream, *streams] == [own, own]
        again.close()
        return first, own, float(array.sum().item())

    launching.end_thread()
    (first, own, total), (again, other, _) = beside_others(run), beside_others(run)
    assert first is again and own != other and total == 300.0
    launching.end_thread()
    assert not first._thread.is_alive()


def test_nothing_is_held_after_the_launch() -> None:
    """A buffer that somebody holds is not written in place."""

    class Arrays(list[mx.array]):
        """Can be referred to weakly."""

    def run() -> bool:
        launches = choose(is_beside=True)
        given = Arrays([mx.ones((3,)) + 1])
        seen = weakref.ref(given)
        launches.start(given)
        launches.join()
        del given
        is_gone = seen() is None
        launches.close()
        return is_gone

    assert beside_others(run)


def test_a_fault_reaches_the_one_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. After a fault it can be left out, and the next arrays are launched as ever."""
    real, faults = mx.async_eval, [ASKED, ASKED]

    def failing(*arrays: Any) -> None:
        if faults:
            raise faults.pop()
        real(*arrays)

    def run() -> float:
        launches = choose(is_beside=True)
        monkeypatch.setattr(mx, "async_eval", failing)
        launches.start(mx.ones((3,)) + 1)
        with pytest.raises(RuntimeError, match="Unable to allocate"):
            launches.join()
        launches.join()
        launches.start(mx.ones((3,)) + 1)
        assert launches.settle() is ASKED and launches.settle() is None
        array = mx.ones((3,)) + 1
        launches.start(array)
        launches.join()
        launches.close()
        return float(array.sum().item())

    assert beside_others(run) == 6


def test_a_fault_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is short then. What the frames above held goes with them, without a collection."""
    real, left = mx.async_eval, [1]

    def failing(*arrays: Any) -> None:
        if left:
            left.clear()
            raise RuntimeError(str(ASKED))
        real(*arrays)

    class Graph:
        """Stands for the arrays of a step."""

    def step(launches: Any) -> Any:
        upcoming = Graph()
        seen = weakref.ref(upcoming)
        launches.start(mx.ones((3,)) + 1)
        try:
            launches.join()
        except RuntimeError:
            return seen
        raise AssertionError("nothing was raised")

    def run() -> bool:
        launches = choose(is_beside=True)
        monkeypatch.setattr(mx, "async_eval", failing)
        gc.disable()
        try:
            return step(launches)() is None
        finally:
            gc.enable()
            launches.close()

    assert beside_others(run)


def test_what_is_done_between_is_done_by_the_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first arrays, before the rest. Only the last of these may be launched later.

    Whoever is told takes Python, which a thread needs between two launches.
    """
    by: list[tuple[str, Any]] = []
    real, told, may_go_on = mx.async_eval, threading.Event(), threading.Event()

    def noting(arrays: list[mx.array]) -> None:
        if len(arrays) == 2:
            assert not told.wait(0.2), "it is told before the launch that is not the last"
        if len(arrays) == 3:
            assert may_go_on.wait(SECONDS)
        by.append((threading.current_thread().name, len(arrays)))
        real(arrays)

    def run() -> list[float]:
        launches = choose(is_beside=True)
        assert launches.starts_early
        monkeypatch.setattr(mx, "async_eval", noting)
        first = mx.ones((3,)) + 1
        last = first * 2

        def between() -> float:
            mx.eval(first)
            by.append((threading.current_thread().name, "between"))
            return float(first.sum().item())

        found = [launches.start_around([first], between, [last, last + 1], [last - 1] * 3)]
        told.set()
        assert by[-1][1] == 2
        may_go_on.set()
        launches.join()
        found.append(last.sum().item())
        launches.close()
        return found

    assert beside_others(run) == [6, 12]
    assert by == [("batchkv-launch", one) for one in (1, "between", 2, 3)]


@pytest.mark.parametrize("at", ["first", "between", "rest"])
def test_a_fault_around_reaches_the_one_who_waits(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or with the next join. Then nothing is held, and the thread launches as ever."""
    real = mx.async_eval

    class Arrays(list[mx.array]):
        """Can be referred to weakly."""

    def failing(arrays: list[mx.array]) -> None:
        if at == ("rest" if isinstance(arrays, Arrays) else "first"):
            raise RuntimeError(str(ASKED))
        real(arrays)

    def between() -> int:
        if at == "between":
            raise RuntimeError(str(ASKED))
        return 7

    def run() -> bool:
        launches = choose(is_beside=True)
        monkeypatch.setattr(mx, "async_eval", failing)
        given = Arrays([mx.ones((3,)) + 1])
        seen = weakref.ref(given)
        with pytest.raises(RuntimeError, match="Unable to allocate"):
            assert launches.start_around(given[:], between, given) == 7
            launches.join()
        launches.join()
        del given
        is_gone = seen() is None
        monkeypatch.setattr(mx, "async_eval", real)
        assert launches.start_around([mx.ones((1,))], lambda: 8, [mx.zeros((1,))]) == 8
        launches.close()
        return is_gone

    assert beside_others(run)


def test_a_failed_device_comes_before_memory_that_ran_out() -> None:
    """Where a step and its launch fail. What MLX raised is never lost."""
    device = RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity")
    assert graver(ASKED, device) is device and graver(device, ASKED) is device
    assert graver(ASKED, None) is ASKED and graver(ASKED, ValueError("x")) is ASKED


def test_the_own_thread_launches_where_streams_are_not_shared() -> None:
    """As on devices without it, and where MLX refuses another thread."""
    assert isinstance(choose(is_beside=False), AtOnce)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(choose(is_beside=True)))
    thread.start()
    thread.join(SECONDS)
    assert isinstance(found[0], AtOnce) and not threads()


@pytest.mark.parametrize("evaluates", ["nothing", "steps", "prompts"])
def test_a_model_that_computes_while_it_is_built_is_launched_as_ever(evaluates: str) -> None:
    """Such a graph cannot be traced, which a start finds out."""
    model = tiny_models.build("llama")

    class Looks(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, **named: Any) -> mx.array:
            logits = super().__call__(tokens, **named)
            if evaluates == ("prompts" if tokens.shape[1] > 1 else "steps"):
                mx.eval(logits)
            return logits

    model.__class__ = Looks
    kept = replace(GPU, measurements=Measurements())
    config = EngineConfig("float", slots=2, memory_bytes=2**27, path="fused", backend=kept)

    def run() -> bool:
        running = Engine(tiny_models.loaded(model), config)
        is_beside = isinstance(running._launches, Beside)
        running.close()
        return is_beside

    assert beside_others(run) is (evaluates == "nothing")


class Held:
    """Launches at the join. Between start and join nothing may be computed."""

    open: list[Held] = []  # noqa: RUF012 - of one test at a time
    starts_early = True

    def __init__(self, real: Callable[..., None]) -> None:
        self._real = real
        self._given: tuple[Any, ...] = ()
        self.num_layers = self.num_chunks = self.num_early = 0  # that were launched

    def start(self, *arrays: Any) -> None:
        assert not self._given
        if len(arrays) == 1:  # those of a step are two
            self.num_chunks += isinstance(arrays[0], list)
            self.num_layers += isinstance(arrays[0], mx.array)
        self._given = arrays
        Held.open.append(self)

    def start_around(self, first: list[mx.array], between: Callable[[], Any], *rest: Any) -> Any:
        assert not self._given and first
        self.num_early += 1
        self._real(first)
        found = between()
        *soon, last = rest
        self._real(*soon)
        self.start(last, [])
        return found

    def join(self) -> None:
        given, self._given = self._given, ()
        if given:
            Held.open.remove(self)
            self._real(*given)

    close = join

    def settle(self) -> Exception | None:
        return self.join()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Held]]:
    """Engines with such launches, and an error for all that is computed too early."""
    made: list[Held] = []
    names = ("eval", "async_eval", "synchronize", "clear_cache")
    real = {name: getattr(mx, name) for name in names}

    def guarded(name: str) -> Callable[..., None]:
        def call(*arrays: Any) -> None:
            assert not Held.open, f"mx.{name} while a step is launched"
            real[name](*arrays)

        return call

    def chosen(*, is_beside: bool) -> Held:
        made.append(Held(real["async_eval"]))
        return made[-1]

    monkeypatch.setattr(engines, "choose_launches", chosen)
    for name in real:
        monkeypatch.setattr(mx, name, guarded(name))
    yield made
    Held.open.clear()


def engine(*, is_beside: bool, **changes: Any) -> Engine:
    config = EngineConfig(
        *("affine8", 4),
        chunk_tokens=256,
        memory_bytes=2**27,
        path="fused",
        group_cost=0,
        prefix_cells=0,
        backend=replace(GPU, launches_beside=is_beside),
    )
    return Engine(tiny_models.loaded(model_of("llama")), replace(config, **changes))


def rows(count: int = 9) -> list[Sequence]:
    """Greedy ones and others, that share a prefix or not, of several chunks or few tokens."""
    common = random_prompt(99, 280)
    looks_back = {"repetition_penalty": 1.2, "bad_words": ((1, 2), (4,)), "logprobs": 2}
    asked = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.7, **looks_back},
    )
    return [
        Sequence(
            str(index),
            (common if index % 2 else []) + random_prompt(index, 5 + 60 * index),
            Generation(50 - 3 * index, seed=index, **asked[index % 3]),
        )
        for index in range(count)
    ]


def drained(
    running: Engine, given: list[Sequence] | None = None, late: int = 4
) -> dict[str, list[int]]:
    """The tokens of all rows; some come in while others decode."""
    found: dict[str, list[int]] = {}
    waiting = rows() if given is None else given
    for row in waiting[:late]:
        running.submit_row(row)
    left = waiting[late:]
    for _ in range(2000):
        for event in running.step():
            assert isinstance(event, Completed)
            found[event.job_id] = list(event.token_ids)
        running.check_integrity()
        if left and len(found) >= 2:
            running.submit_row(left.pop(0))
        if running.is_idle and not left:
            running.close()
            return found
    raise AssertionError("the engine never becomes idle")


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[int]]:
    return drained(engine(is_beside=False))


def test_rows_are_the_same_with_a_thread_that_launches(wanted: dict[str, list[int]]) -> None:
    def run() -> dict[str, list[int]]:
        running = engine(is_beside=True)
        assert isinstance(running._launches, Beside)
        return drained(running)

    assert beside_others(run) == wanted
    assert not threads()


def test_nothing_is_computed_while_a_step_is_launched(
    held: list[Held], wanted: dict[str, list[int]]
) -> None:
    """Whatever a step has to do besides: rows that come and leave, buffers that grow."""
    running = engine(is_beside=True)
    assert drained(running) == wanted
    assert len(held) == 1
    assert held[0].num_layers == held[0].num_chunks == running._prefill._num_chunks > 3


def test_the_first_layers_wait_for_those_of_the_last_step(
    held: list[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else MLX would copy their buffers. The mark tells it, and keeps none of them alive."""
    waited: list[Any] = []
    real, around = mx.eval, Held.start_around

    def noting(*arrays: Any) -> None:
        waited.append(arrays[0])
        real(*arrays)

    def start_around(self: Held, first: list[mx.array], *rest: Any) -> Any:
        step, upcoming = running._in_flight, running._upcoming
        assert step is not None and step.mark is not None and waited[-1] is step.mark
        assert isinstance(upcoming, Step) and len(rest) == 3
        assert len(rest[1]) == 1 and rest[1][0] is upcoming.mark, "launched before the others"
        slots = running._slots
        assert all(one is other for one, other in zip(first, slots.first_arrays, strict=True))
        # MLX holds what a launch names until that launch has ended, and would copy these too.
        assert {id(array) for array in rest[2]} == {id(array) for array in upcoming.arrays}
        assert step.mark.size == 1
        return around(self, first, *rest)

    running = engine(is_beside=True)
    monkeypatch.setattr(mx, "eval", noting)
    monkeypatch.setattr(Held, "start_around", start_around)
    drained(running)
    assert held[0].num_early > 40


def test_the_mark_is_of_the_layer_after_the_first() -> None:
    """Which it computes when the attention of the first ones has ended. It is no view."""
    running = engine(is_beside=False)
    running.submit_row(rows()[0])
    for _ in range(4):
        running.step()
    slots, mark = running._slots, running._slots.mark()
    few = len(slots.first_arrays) // len(slots.layers[0].arrays)
    numbers = [float(layer.arrays[0].reshape(-1)[0].item()) for layer in slots.layers]
    assert 0 < few < len(numbers) == len(set(numbers))
    assert mark is not None and mark.item() == mx.array(numbers[few]).item()
    assert mark.dtype != slots.layers[few].arrays[0].dtype
    running.close()


def test_nothing_is_computed_while_layers_of_a_chunk_are_launched(
    held: list[Held], wanted: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself, and the host waits for the one before."""
    monkeypatch.setattr(pacing, "BYTES_AT_ONCE", 0)
    monkeypatch.setattr(pacing, "BYTES_AHEAD", 0)
    monkeypatch.setattr(pacing, "STARTS_AHEAD", 1)
    running = engine(is_beside=True)
    assert drained(running) == wanted
    num_layers = len(running.plan.kinds)
    assert held[0].num_layers == running._prefill._num_chunks * num_layers and num_layers > 1


def test_a_size_of_chunks_that_fails_leaves_no_launch_open(
    held: list[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out while the model is built. Smaller chunks serve."""
    end = PrefillRows.end

    def failing_end(self: PrefillRows) -> None:
        if self.capacity == 1024:
            raise RuntimeError(str(ASKED))
        end(self)

    monkeypatch.setattr(PrefillRows, "end", failing_end)
    running = engine(is_beside=True, chunk_tokens=None)
    assert not Held.open and running.chunk_tokens < 1024
    running.close()


def test_sizes_of_chunks_are_measured_with_the_thread(held: list[Held]) -> None:
    """As they are computed later."""
    running = engine(is_beside=True, chunk_tokens=None)
    assert held[0].num_layers == held[0].num_chunks > len(chunk_size.SIZES)
    running.close()


def test_memory_that_is_short_makes_rows_leave_and_come_back(held: list[Held]) -> None:
    """Their slots are copied, shrunk and filled again."""

    roomy = engine(is_beside=True, slots=admission.ROWS)
    memory_bytes = admission.room(roomy.plan.costs, 2000)
    short = engine(is_beside=True, slots=admission.ROWS, memory_bytes=memory_bytes, prefix_bytes=0)
    admission.expect_short_answers(short)
    expected = drained(roomy, admission.rows(), admission.ROWS)
    assert drained(short, admission.rows(), admission.ROWS) == expected
    assert short._decode_rows.num_preempted > 0 and roomy._decode_rows.num_preempted == 0


def test_a_fault_while_a_step_is_launched(
    held: list[Held], wanted: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch ends before rows are computed again."""
    running = engine(is_beside=True)
    broken = failing(DecodeSlots.end_step, {5, 11, 12}, ASKED)
    monkeypatch.setattr(DecodeSlots, "end_step", broken)
    assert drained(running) == wanted
    assert running._recovery.num_out_of_memory == 3


def test_rows_with_guides_are_chosen_after_the_launch(held: list[Held]) -> None:
    rows = [guided_rows.work(f"{n}", "regex", "[a-z]{9}", seed=n) for n in range(3)]
    rows.append(guided_rows.work("free", max_tokens=20))
    with_guides = guided_rows.engine(backend=GPU)
    found = guided_rows.run(with_guides, rows)
    assert len(held) == 1 and len(found) == 4
    assert all(found[f"{n}"].text.isalpha() and len(found[f"{n}"].text) == 9 for n in range(3))


def test_blocks_are_sent_after_the_launch(
    held: list[Held], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One engine writes them while it decodes, the other one takes them."""
    prompts = stores.behind(600, 30, 300, 90)
    answers = []
    for _ in range(2):
        way = stores.access(stores.on_disk(tmp_path))
        with stores.running(model_of("llama"), way, backend=GPU) as running:
            answers.append(stores.run(running, prompts, 30))
            assert running.client.flush(30)  # type: ignore[attr-defined]
    assert stores.tokens(answers[0]) == stores.tokens(answers[1])
    assert min(stores.cached(answers[1])) >= 512 and len(held) == 2
    assert "handed to the store" not in caplog.text


def test_blocks_that_wait_end_no_launch(
    held: list[Held], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is built beside a launch, although blocks wait until the store has room."""
    monkeypatch.setattr(outbox, "QUEUED_BYTES", -1)
    way = stores.access(stores.on_disk(tmp_path))
    with stores.running(model_of("llama"), way, backend=GPU) as running:
        for one in stores.behind(600, 30, 300):
            running.submit_row(Sequence(str(len(one)), one, Generation(20, temperature=0.0)))
        are_open = []
        while not running.is_idle:
            running.step()
            if running.client.is_busy and running.progress().num_decode:
                are_open.append(bool(Held.open))
        assert sum(are_open) > 10
        assert running.client.flush(30)  # type: ignore[attr-defined]
    assert running.client.counters["published"] > 0


def test_an_engine_rests_and_ends_whatever_is_launched(held: list[Held]) -> None:
    running = engine(is_beside=True)
    running.submit_row(rows()[0])
    running.step()
    assert Held.open
    running.rest()
    running.step()
    assert Held.open
    running.close()
    assert not Held.open


def test_the_first_draw_of_the_kernel_is_compared_after_the_launch() -> None:
    """This waits for results, but no other draw does."""
    joined: list[int] = []

    class Kernel:
        def __call__(self, logits: mx.array, given: Any) -> mx.array:
            assert joined == [1]
            return mx.argmax(logits, axis=-1)

    few = FewTokens(Kernel(), lambda: joined.append(1))  # type: ignore[arg-type]
    logits = mx.array([[0.0, 80.0, 1.0, 2.0]] * 2)
    likeliest = Generation(9, temperature=0.5, top_k=2, seed=1)
    drawing = [Sequence(str(n), [1, 2], likeliest) for n in range(2)]
    broken = FewTokens(Kernel(), failing(lambda: joined.append(1), {1}, ASKED))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        sample(logits, mx.array([1, 1]), drawing, few=broken)
    assert not broken._is_checked
    for _ in range(3):
        found = sample(logits, mx.array([1, 1]), drawing, few=few)
        assert found.tokens.tolist() == [1, 1]
    assert joined == [1]


@pytest.mark.parametrize("at", [{1}, {3}, {9, 10}, {25}])
def test_memory_that_runs_out_during_a_launch(
    at: set[int], wanted: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are computed again, token for token. The first launch is of a chunk's first layer."""
    made = [0]

    class Failing:
        """MLX, which runs out of memory at some launches."""

        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        def async_eval(self, *arrays: Any) -> None:
            made[0] += threading.current_thread().name == "batchkv-launch"
            if made[0] - 1 in at:  # the first call is that of ``choose``
                at.remove(made[0] - 1)
                raise ASKED
            mx.async_eval(*arrays)

    monkeypatch.setattr(launching, "mx", Failing())

    def run() -> tuple[dict[str, list[int]], int]:
        running = engine(is_beside=True)
        return drained(running), running._recovery.num_out_of_memory

    count = len(at)
    assert beside_others(run) == (wanted, count) and not at
