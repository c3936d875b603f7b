"""The readers of bytes that others, or a model, wrote, each with the one thing that it may end in.

``check_*`` takes any bytes and raises AssertionError, or whatever the reader should not have
raised. They are shared by the suite's short runs and by ``make fuzz``.
"""

from __future__ import annotations

import atexit
import io
import json
import random
import re
from collections.abc import Container
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from jsonschema.exceptions import SchemaError, UnknownType
from jsonschema.exceptions import _WrappedReferencingError as RefResolutionError

from batchkv_cache_store.blocks.block import Expected, Kind, decode, decode_any
from batchkv_cache_store.blocks.peek import peek, peek_links
from batchkv_cache_store.blocks.seal import SEAL_BYTES, Sealer
from batchkv_cache_store.errors import BlockRejected
from batchkv_cache_store.keys import next_key
from batchkv_producer.errors import WireError
from batchkv_producer.intake.body import ENDPOINTS
from batchkv_producer.intake.checks import RowFault
from batchkv_producer.intake.formats import Row, RowError, read_rows
from batchkv_producer.intake.single import param_of, read_single
from batchkv_producer.results.output import failed_text_line, output_line, text_line
from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_producer.wire.job import (
    MAX_JOB_BYTES,
    Request,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)
from batchkv_worker.engine.answers.answer_format import answer_format
from batchkv_worker.engine.answers.forced_calls import forced_call
from batchkv_worker.engine.answers.reader import AnswerReader
from batchkv_worker.engine.answers.tool_calls import TimeLimit
from batchkv_worker.engine.grammar.compiling import Compiled, Trial, compiled_matcher
from batchkv_worker.engine.grammar.guide import GrammarGuide
from batchkv_worker.engine.grammar.text import GrammarFault
from batchkv_worker.engine.grammar.tokens import token_table
from batchkv_worker.engine.tokens.guide import GuideFault, new_masks
from batchkv_worker.engine.tokens.requests import prepare
from batchkv_worker.engine.tokens.text_limits import RowRefused
from batchkv_worker.events import Work
from support import tiny_models, tiny_tokenizers
from support.tool_texts import WEATHER
from worker.engine.grammar.guided_rows import VOCABULARY, loaded_model, matches, tokenizer

CODES = {value for name, value in vars(ErrorCode).items() if name.isupper()}
PLAIN = Sealer()
SEALERS = (PLAIN, Sealer(b"sixteen bytes or more"))
MAX_MESSAGE_CHARS = 2000
MAX_BODIES = 5  # of lines that are read as bodies, too


def check_lines(data: bytes) -> None:
    """Every line that is not blank becomes a row or an error with a code; no row is lost."""
    check_bodies(data)
    stream = io.BytesIO(data)
    seen = []
    for item in read_rows(stream):
        seen.append(item.line)
        if isinstance(item, RowError):
            assert item.code in CODES
            assert item.message and len(item.message) < MAX_MESSAGE_CHARS
            item.message.encode("utf-8")
        else:
            assert isinstance(item, Row)
            assert decode_job(encode_job(item.request)) == item.request
    assert seen == sorted(set(seen))
    lines = data.removeprefix(b"\xef\xbb\xbf").splitlines() if b"\r" not in data else None
    if lines is not None and not set(data) & {0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85}:
        assert len(seen) == sum(bool(line.strip()) for line in lines)


def check_bodies(data: bytes) -> None:
    """A line may come alone, over HTTP: it is a request, or a RowFault with a code."""
    for line in data.splitlines()[:MAX_BODIES]:
        for endpoint in ENDPOINTS.values():
            try:
                found = read_single(line, endpoint)
            except RowFault as fault:
                assert fault.code in CODES and 0 < len(str(fault)) < MAX_MESSAGE_CHARS
                param = param_of(fault.code, str(fault)) or ""
                (str(fault) + param).encode("utf-8")
                continue
            assert found.rows
            for row in found.rows:
                assert decode_job(encode_job(row)) == row


class Tokenizer(tiny_models.NumberTokenizer):
    """Has a template that joins what it is given, and no model behind it."""

    has_chat_template = True
    chat_template = "{{ tools }}{{ reasoning_effort }}{{ thinking_budget }}"
    eos_token_ids = frozenset({2, 600})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(text) % 500 + 1]

    def apply_chat_template(self, messages: object, **options: object) -> list[int]:
        json.dumps([messages, options], default=str)
        return [1, 2]


class Loaded:
    """What ``prepare`` asks of a model."""

    tokenizer = Tokenizer()
    context = 4096
    vocabulary = 512
    special_tokens = frozenset({2})
    defaults: dict[str, float] = {}  # noqa: RUF012 - never changed


def check_job(data: bytes) -> None:
    """A WireError, or a request; and that a RowRefused, or a sequence that the engine may run."""
    try:
        request = decode_job(data)
    except WireError as fault:
        assert len(str(fault)) < MAX_MESSAGE_CHARS
        return
    assert isinstance(request, Request) and len(data) <= MAX_JOB_BYTES
    encode_job(request)
    try:
        sequence = prepare(Work("b-1", request), Loaded())  # type: ignore[arg-type]
    except RowRefused as fault:
        assert fault.code in CODES and len(str(fault)) < MAX_MESSAGE_CHARS
        return
    if request.tools:
        check_forced_call(request.tools, request.tool_choice or "required")
    generation = sequence.generation
    assert 1 <= generation.max_tokens <= Loaded.context
    assert 0 <= generation.temperature <= 100 and 0 <= generation.top_p <= 1
    assert all(0 < len(stop) <= 1024 for stop in generation.stop) and len(generation.stop) <= 16
    assert generation.min_tokens <= generation.max_tokens
    assert all(
        -2 <= penalty <= 2
        for penalty in (generation.presence_penalty, generation.frequency_penalty)
    )
    biased, words = dict(generation.logit_bias), generation.bad_words
    ids = {*sequence.prompt, *biased, *generation.stop_token_ids, *generation.late_tokens}
    assert ids.union(*words) <= {*range(Loaded.vocabulary)} and () not in words
    assert all(-100 <= bias <= 100 for bias in biased.values())


FORMS = {
    kind: answer_format(tiny_tokenizers.tokenizer(kind))
    for kind in ("qwen3", "qwen3_coder", "mistral", "pythonic", "gemma4", "kimi_k3", "gpt_oss")
}
LIMIT = TimeLimit(60.0)


def check_forced_call(tools: list[dict[str, Any]], choice: str) -> None:
    """A grammar that may be compiled, or a refusal."""
    for kind in ("qwen3", "qwen3_coder", "pythonic"):
        try:
            found = forced_call(tools, choice, FORMS[kind], is_single=False)
        except RowRefused as fault:
            assert fault.code in CODES and len(str(fault)) < MAX_MESSAGE_CHARS
        else:
            assert not found.fault()


def check_answer(data: bytes) -> None:
    """Parts of a text, whatever the model wrote: calls are of the row's tools, and JSON."""
    text = data.decode("utf-8", "replace")
    for kind, form in FORMS.items():
        rows = AnswerReader(form, "normal", tiny_tokenizers.tokenizer(kind), LIMIT, [WEATHER])
        answer = rows.read("b-1", text, data)
        for call in answer.tool_calls:
            assert call.name == "get_weather" and call.id
            assert isinstance(json.loads(call.arguments), dict)
        assert len(answer.text) + len(answer.reasoning) <= len(text) + 2 * text.count("<")
        assert bool(answer.num_reasoning) <= bool(answer.reasoning)


def check_result(data: bytes) -> None:
    """A WireError, or a result that can be printed as JSON and as text, each on one line."""
    try:
        result = decode_result(data)
    except WireError:
        return
    texts = text_line(result), failed_text_line(result)
    for line in (output_line("0123456789abcdef-1", result), *texts):
        line.encode("utf-8")
        assert "\n" not in line and "\r" not in line
    encode_result(result)


def check_block(data: bytes) -> None:
    """A BlockRejected, also when whoever made the bytes can compute a checksum, or a block."""
    for content in (data, data[:-SEAL_BYTES] + PLAIN.seal((data[:-SEAL_BYTES],))):
        for sealer in SEALERS:
            try:
                block = decode_any(content, sealer)
            except BlockRejected:
                continue
            inside = sum(tensor.num_bytes for tensor in block.tensors)
            assert inside <= len(content) and len(block.tokens) <= len(content)
            other = Expected(block.namespace, next_key(block.key, [1]), Kind.KV, block.tokens)
            try:
                decode(content, sealer, other)
            except BlockRejected:
                continue
            raise AssertionError("a block of another key was taken")
        for look in (peek, peek_links):
            try:
                look(content)
            except BlockRejected:
                continue


def check_grammar(data: bytes) -> None:
    """A constraint is refused in one line, or its guide gives texts that match it."""
    try:
        kind, value, number = json.loads(data)
        constraint = Constraint(kind, value)
        if constraint.fault():
            return
    except (ValueError, TypeError, RecursionError):
        return
    table = token_table(loaded_model())
    try:
        text = _trial().text_of(constraint)
        grammar = Compiled(text, _tokens(), table.ends, compiled_matcher(text, _tokens()))
    except GrammarFault as refused:
        assert 0 < len(str(refused)) < 300 and "\n" not in str(refused)
        return
    tokens = _drawn(GrammarGuide(grammar), random.Random(number), table.ends)
    if tokens is None or kind in ("regex", "grammar"):
        return
    answer = tokenizer().decode(tokens)
    # A schema that refers to itself without an end is too deep for the validator.
    with suppress(RefResolutionError, UnknownType, SchemaError, RecursionError, re.error):
        assert matches(constraint, answer), (constraint, answer)


def _drawn(guide: GrammarGuide, rng: random.Random, ends: Container[int]) -> list[int] | None:
    """Tokens up to the end, the shorter ones more often; None if it does not end soon."""
    tokens: list[int] = []
    while len(tokens) < 60:
        (mask,) = new_masks(1, VOCABULARY)
        try:
            guide.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            assert allowed
            token = rng.choice(allowed[:40] if rng.random() < 0.7 else allowed)
            if token in ends:
                return tokens
            guide.take(token)
        except GuideFault as fault:
            assert len(str(fault)) < 300
            return None
        tokens.append(token)
    return None


@cache
def _trial() -> Trial:
    made = Trial(token_table(loaded_model()))
    atexit.register(made.end)
    return made


@cache
def _tokens() -> Any:
    return token_table(loaded_model()).build()


CHECKS = {
    "grammar": check_grammar,
    "lines": check_lines,
    "job": check_job,
    "result": check_result,
    "block": check_block,
    "answer": check_answer,
}
