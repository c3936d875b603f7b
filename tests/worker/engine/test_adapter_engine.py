"""One model with several adapters: the tokens of each are mlx-lm's, and no block is shared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchkv_producer.wire.adapter import Adapter
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.adapter_engine import AdapterEngine
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed, ExchangesAdapters, PreparesAhead, Work
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.start.backend import choose_backend
from batchkv_worker.model.adapter_files import read
from batchkv_worker.model.adapters import load_all
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.prefix.shared.access import Access
from support import tiny_models
from support.adapters import as_mlx_lm, quantized, write_adapter
from worker.prefix.engines_on_store import access, on_disk, random_prompt

COUNT = 6
PROMPTS = [random_prompt(seed, length) for seed, length in ((1, 5), (3, 290))]
Make = Callable[[], Any]


def serving(
    model: Any, folders: Sequence[Path], way: Access | None = None, scheme: str = "float"
) -> AdapterEngine:
    """An engine over a model that has a fingerprint, and these adapters by their folders' names."""
    loaded = tiny_models.loaded(model, fingerprint="f" * 32, config=dict(vars(model.args)))
    files = [read(Adapter(folder.name, str(folder))) for folder in folders]
    home = folders[0].parent / "home"  # so that each model is checked once
    config = EngineConfig(
        **{"scheme": scheme, "slots": 4, "chunk_tokens": 256, "memory_bytes": 2**30},
        **{"path": "fused", "group_cost": 64},
        backend=choose_backend(Measurements.in_home(home, {"model": id(model)})),
    )
    return AdapterEngine(
        loaded, load_all(files, loaded), lambda one: Engine(one, config, way), scheme, way
    )


def tokens_of(engine: AdapterEngine, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(row.token_ids) for row in completed(engine, prompts)]


def completed(engine: AdapterEngine, prompts: Sequence[list[int]] = PROMPTS) -> list[Completed]:
    """The greedy answers to all prompts at once, in their order."""
    params = SamplingParams(max_tokens=COUNT, temperature=0.0)
    for number, prompt in enumerate(prompts):
        text = " ".join(map(str, prompt))
        request = Request(str(number), "completion", prompt=text, params=params)
        engine.add(Work(str(number), request, shared_bytes=len(text)))
    found = {event.job_id: event for event in ended(engine)}
    return [found[str(number)] for number in range(len(prompts))]


CASES: list[tuple[str, Make, str]] = [
    ("llama", lambda: tiny_models.build("llama"), "lora"),
    ("llama, DoRA", lambda: tiny_models.build("llama"), "dora"),
    ("llama in 4 bits", lambda: quantized("llama"), "lora"),
    ("gpt_oss: windows and experts", lambda: tiny_models.build("gpt_oss"), "lora"),
    ("qwen2: biases", lambda: tiny_models.build("qwen2"), "lora"),
]


@pytest.mark.parametrize(("make", "kind"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_tokens_are_those_of_mlx_lm_with_the_adapter(tmp_path: Path, make: Make, kind: str) -> None:
    """The model alone, each adapter, and the model again, as mlx-lm computes them. All rows are
    counted, also for a reader during an exchange."""
    model = make()
    folders = [
        write_adapter(tmp_path / name, model, kind=kind, seed=seed)
        for seed, name in enumerate(("a", "b"))
    ]
    engine = serving(model, folders)
    assert isinstance(engine, ExchangesAdapters)
    found: dict[str, list[list[int]]] = {}
    build, counted = engine._build, list[int]()

    def num_rows() -> int:
        return sum(engine.figures().times["row.batch"].counts)

    def counting(loaded: LoadedModel) -> Engine:
        counted.append(num_rows())  # as another thread would read it now
        return build(loaded)

    engine._build = counting
    for number, name in enumerate(("", "a", "b", ""), 1):
        engine.serve(name)
        answers = tokens_of(engine)
        assert found.setdefault(name, answers) == answers
        assert engine.maker == engine.makers[name]
        assert num_rows() == number * len(PROMPTS)
    assert counted == [len(PROMPTS) * number for number in (1, 2, 3)]
    engine.close()
    models = {"": make(), **{each.name: as_mlx_lm(make(), each) for each in folders}}
    for name, answers in found.items():
        assert answers == [tiny_models.alone(models[name], prompt, COUNT) for prompt in PROMPTS]
    assert len({str(answers) for answers in found.values()}) == 3  # the adapters matter
    assert len({maker.fingerprint for maker in engine.makers.values()}) == 3


def test_rows_are_prepared_for_the_adapter_that_is_served(tmp_path: Path) -> None:
    """A row that another thread prepares has the tokens of one that is added at once."""
    model = tiny_models.build("llama")
    engine = serving(model, [write_adapter(tmp_path / "a", model, seed=1)])
    assert isinstance(engine, PreparesAhead)
    assert engine.prepares_ahead == engine.engine.prepares_ahead
    for name in ("", "a"):
        engine.serve(name)
        want = tokens_of(engine, PROMPTS[:1])
        params = SamplingParams(max_tokens=COUNT, temperature=0.0)
        request = Request("r", "completion", prompt=" ".join(map(str, PROMPTS[0])), params=params)
        queue = engine.prepare(Work("r", request))
        assert engine.is_idle
        queue()
        assert [list(event.token_ids) for event in ended(engine)] == want
    engine.close()


def ended(engine: AdapterEngine) -> list[Completed]:
    """The rows that end until there are none."""
    found = []
    while not engine.is_idle:
        for event in engine.step():
            assert isinstance(event, Completed), event
            found.append(event)
    return found


def test_blocks_are_of_one_adapter(tmp_path: Path) -> None:
    """Other workers get hits from blocks of the same adapter, under any name, and of no other."""
    model = tiny_models.build("llama")
    a, b = (write_adapter(tmp_path / name, model, seed=seed) for seed, name in ((1, "a"), (2, "b")))
    same = write_adapter(tmp_path / "also-a", model, seed=1)
    tiers, prompts = tmp_path / "blocks", [random_prompt(9, 600)]

    def way() -> Access:
        return access(on_disk(tiers), outlives_engine=True, writes="all")

    def cached(engine: AdapterEngine, name: str) -> int:
        engine.serve(name)
        return completed(engine, prompts)[0].usage.cached

    first = serving(model, [a, b], way())
    assert [cached(first, name) for name in ("", "a", "")] == [0, 0, 512]  # from the disk
    first.close()
    second = serving(tiny_models.build("llama"), [b, same], way())
    assert [cached(second, name) for name in ("", "b", "also-a")] == [512, 0, 512]
    second.close()
    alone = tiny_models.build("llama")
    assert tiny_models.alone(alone, prompts[0], COUNT) != tiny_models.alone(
        as_mlx_lm(alone, a), prompts[0], COUNT
    )


def test_an_exchange_measures_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The choices of the model alone serve with every adapter, too. So its log is one line."""
    caplog.set_level(logging.INFO, "batchkv")
    model = tiny_models.build("llama")
    folder = write_adapter(tmp_path / "a", model)
    loaded = tiny_models.loaded(model, fingerprint="f" * 32)
    backend = choose_backend(Measurements.in_home(tmp_path / "home", {"model": "tiny"}))
    config = EngineConfig(
        scheme="affine8", slots=2, chunk_tokens=256, memory_bytes=2**28, backend=backend
    )
    adapters = load_all([read(Adapter("a", str(folder)))], loaded)
    engine = AdapterEngine(loaded, adapters, lambda one: Engine(one, config), "affine8")
    assert backend.measurements.has_measured
    backend.measurements.has_measured = False
    assert "decode attention" in caplog.text
    caplog.clear()
    engine.serve("a")
    assert [record.getMessage() for record in caplog.records] == ["serving tiny@a"]
    assert not backend.measurements.has_measured
    assert tokens_of(engine, PROMPTS[:1])
    engine.close()
