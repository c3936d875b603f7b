"""The small fields of rows through a whole engine: alone, and among rows that come and go."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.events import Completed, Work
from support import tiny_models
from worker.engine.tokens.logit_reference import expected_logits
from worker.kv.crowd import model_of, random_prompt

VOCABULARY = tiny_models.VOCABULARY
COUNT = 24
LIKELY = tuple((token, 6.0) for token in (0, 1, 2, 3, VOCABULARY - 1))  # so that tokens repeat

# Names of rows, and what each asks for beside LIKELY.
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"frequency_penalty": -0.5, "presence_penalty": -2.0},
    "biased": {"logit_bias": (*LIKELY, (9, -100.0), (10, 8.0))},
    "words": {"bad_words": ("1", "2 3", "3 2 0", "0 0")},
    "late": {"stop_token_ids": (0, 1, 2, 3), "min_tokens": 7},
    "stop": {"stop_token_ids": (2,)},
    "all": {
        **{"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4},
        **{"bad_words": ("0 1", "2", "3 0 3"), "stop_token_ids": (3,), "min_tokens": 5},
    },
}


def works(**changes: Any) -> list[Work]:
    made = []
    for index, (name, asked) in enumerate(ASKED.items()):
        values = {"max_tokens": COUNT, "logit_bias": LIKELY, "temperature": 0.0} | asked | changes
        tokens = [0, 3, *random_prompt(index, 9 + 40 * (index % 3))]
        params = SamplingParams(**values)
        made.append(Work(name, Request(name, "completion", prompt_tokens=tokens, params=params)))
    return made


def run(wanted: list[Work], slots: int) -> dict[str, Completed]:
    """All rows through one engine, each with a step between it and the next."""
    loaded = tiny_models.loaded(model_of("llama"))
    config = EngineConfig(scheme="float", slots=slots, chunk_tokens=256, memory_bytes=2**28)
    running = Engine(loaded, tiny_models.with_measured(loaded.model, config))
    ended: dict[str, Completed] = {}

    def step() -> None:
        for event in running.step():
            assert isinstance(event, Completed), event
            ended[event.job_id] = event

    for work in wanted:
        running.add(work)
        step()
    while not running.is_idle:
        step()
        running.check_integrity()
    running.close()
    return ended


def expected(work: Work) -> list[int]:
    """The tokens of a greedy row, computed from whole forward passes and plain numpy."""
    model = model_of("llama")
    row = prepare(work, tiny_models.loaded(model))
    output: list[int] = []
    while len(output) < row.generation.max_tokens:
        logits = np.array(model(mx.array([row.prompt + output]))[0, -1])
        found = expected_logits(logits, row.prompt, output, row.generation)
        output.append(int(found.argmax()))
        if output[-1] in row.generation.stop_token_ids:
            break
    return output


def test_each_field_does_what_vllm_means() -> None:
    """Greedy rows give the tokens of a plain computation, among rows that come and go."""
    wanted = works()
    ended = run(wanted, slots=4)
    found = {name: list(event.token_ids) for name, event in ended.items()}
    assert found == {work.job_id: expected(work) for work in wanted}
    assert len({tuple(tokens[:8]) for tokens in found.values()}) >= 6  # the fields do something
    assert 1 not in found["words"] and 10 in found["biased"] and 9 not in found["biased"]
    assert ended["late"].finish_reason == "stop" and len(found["late"]) >= 8


def test_sampled_rows_are_the_same_alone_and_among_others() -> None:
    """With a seed, each row gives the same tokens, texts and log-probabilities alone."""
    changes: dict[str, Any] = {"temperature": 0.9, "seed": 5, "logprobs": 2}
    wanted = works(**changes)
    together = run(wanted, slots=4)
    for work in (work for work in wanted if work.job_id in ("plain", "words", "late", "all")):
        (alone,) = run([work], slots=1).values()
        event = together[work.job_id]
        assert (alone.token_ids, alone.text) == (event.token_ids, event.text), work.job_id
        for mine, other in zip(alone.logprobs or (), event.logprobs or (), strict=True):
            assert mine.token == other.token
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_an_id_beyond_the_vocabulary_ends_its_row_alone() -> None:
    """It is refused by name; the last id is served; rows beside it are not harmed."""
    loaded = tiny_models.loaded(model_of("llama"), vocabulary=VOCABULARY)
    config = EngineConfig(scheme="float", slots=2, chunk_tokens=256, memory_bytes=2**28)
    running = Engine(loaded, tiny_models.with_measured(loaded.model, config))
    for name, token in (("good", VOCABULARY - 1), ("bad", VOCABULARY)):
        params = SamplingParams(max_tokens=3, logit_bias=((token, 100.0),))
        running.add(Work(name, Request(name, "completion", prompt="1 2", params=params)))
    events = []
    while not running.is_idle:
        events += running.step()
    refused, served = events
    assert "logit_bias has the token id" in refused.message and refused.job_id == "bad"
    assert served.token_ids == (VOCABULARY - 1,) * 3
    running.close()
