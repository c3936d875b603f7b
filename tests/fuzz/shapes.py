"""Strategies: bytes that come close to what the readers are for, so that they get far."""

from __future__ import annotations

import json
import re
import struct
import zlib
from typing import Any

import msgpack
from hypothesis import strategies as st

from batchkv_producer.wire.job import FUNCTION_NAME
from cache_store.blocks import PLAIN, encoded, make_block
from support.tool_texts import CALLS
from worker.engine.grammar.schemas import SCHEMAS as KEYWORDS
from worker.engine.grammar.schemas import UNSUPPORTED

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "user", "system", "x", "{{ 1 }}", "/v1/completions", "POST", "\x1b[31m"]),
)
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, 2**63, 2**64, -(2**63) - 1, 1e308, 0.5, -0.0]),
)
PLAIN_VALUES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    PLAIN_VALUES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
IDS = st.lists(st.integers(-1, 600) | NUMBERS, max_size=3)
PARAMS = {
    name: st.one_of(st.sampled_from([True, False, 1, 0, ["x"]]), IDS, VALUES)
    for name in (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs"),
        *("repetition_penalty", "top_logprobs", "max_completion_tokens", "presence_penalty"),
        *("frequency_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop"),
        *("skip_special_tokens", "return_token_ids", "logit_bias", "bad_words"),
        *("thinking_budget", "n"),
    )
}
SCHEMAS = st.one_of(
    st.sampled_from([{"type": "object"}, {}, True, {"$ref": "#"}, "a+", ["a"], 'start: "a"']),
    VALUES,
)
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "x")
ASKED = {
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", *KINDS])},
        optional={"json_schema": st.fixed_dictionaries({"schema": SCHEMAS}) | VALUES},
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", *KINDS, "whitespace_pattern"]), SCHEMAS, max_size=2
    ),
    **{f"guided_{name}": SCHEMAS for name in ("json", "regex", "choice", "grammar")},
    "parallel_tool_calls": VALUES,
    "reasoning_effort": st.sampled_from(["low", "x"]) | VALUES,
    "enable_thinking": VALUES,
    "include_stop_str_in_output": VALUES,
    "thinking_token_budget": VALUES,
}
TOOLS = st.sampled_from([[{"function": {"name": "f"}}], [{"function": {"name": "g"}}, 5]])
CHOICES = st.sampled_from(["auto", "none", "required", {"function": {"name": "f"}}, {"type": "x"}])
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": TEXTS, "content": st.one_of(TEXTS, VALUES)},
            optional={"name": VALUES, "tool_calls": VALUES, "tool_call_id": TEXTS},
        ),
        VALUES,
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        **PARAMS,
        **ASKED,
        "prompt": st.one_of(TEXTS, IDS, VALUES),
        "messages": st.one_of(MESSAGES, VALUES),
        "model": VALUES,
        "tools": TOOLS | VALUES,
        "tool_choice": CHOICES | VALUES,
        "chat_template_kwargs": VALUES,
        "metadata": VALUES,
    },
)
LINES = st.one_of(
    BODIES,
    st.fixed_dictionaries(
        {"body": st.one_of(BODIES, VALUES)},
        optional={"custom_id": VALUES, "url": VALUES, "method": VALUES},
    ),
    VALUES,
)


def as_json(value: Any) -> bytes:
    """JSON as a careless writer has it: NaN, halves of characters and all."""
    return json.dumps(value).encode()


def input_files() -> st.SearchStrategy[bytes]:
    """A few lines, some of them JSON."""
    line = st.one_of(LINES.map(as_json), st.binary(max_size=40), mutated(LINES.map(as_json)))
    ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b""])
    return st.lists(st.tuples(line, ends), max_size=4).map(lambda p: b"".join(a + b for a, b in p))


def mutated(source: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The same with some bytes put in, left out or changed."""
    change = st.tuples(st.integers(0, 2**16), st.integers(0, 3), st.binary(max_size=4))

    def apply(pair: tuple[bytes, list[tuple[int, int, bytes]]]) -> bytes:
        data = bytearray(pair[0])
        for place, length, piece in pair[1]:
            at = place % (len(data) + 1)
            data[at : at + length] = piece
        return bytes(data)

    return st.tuples(source, st.lists(change, min_size=1, max_size=3)).map(apply)


REQUESTS = st.fixed_dictionaries(
    {"custom_id": TEXTS, "endpoint": st.sampled_from(["chat", "completion"])},
    optional={
        "prompt": st.one_of(TEXTS, VALUES),
        "prompt_tokens": st.one_of(IDS, VALUES),
        "messages": st.one_of(MESSAGES, VALUES),
        "tools": TOOLS | VALUES,
        "chat_template_kwargs": VALUES,
        "params": st.one_of(
            st.fixed_dictionaries({}, optional={**PARAMS, "include_stop": VALUES}), VALUES
        ),
        "constraint": st.one_of(
            st.fixed_dictionaries({"kind": st.sampled_from(KINDS)}, optional={"value": SCHEMAS}),
            VALUES,
        ),
        "tool_choice": st.sampled_from(["none", "required", "function:f"]) | VALUES,
        "parallel_tool_calls": VALUES,
        "reasoning_effort": VALUES,
        "surprise": VALUES,
    },
)

# Hypothesis mixes in constants of the code under test, so that any new file deals other cards: what
# is to be accepted at times must not be left to luck alone.
TOKENS = st.integers(-1, 512)
SOUND_PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 9),
        "min_tokens": st.integers(0, 9),
        "presence_penalty": st.floats(-2.1, 2.1),
        "stop_token_ids": st.lists(TOKENS, max_size=3),
        "logit_bias": st.lists(st.tuples(TOKENS, st.floats(-101, 101)).map(list), max_size=3),
        "bad_words": st.lists(TEXTS, max_size=3),
    },
)
SOUND = st.fixed_dictionaries(
    {"custom_id": st.text("abc-1", min_size=1), "endpoint": st.just("completion")},
    optional={"params": SOUND_PARAMS},
).flatmap(lambda request: TEXTS.map(lambda prompt: {**request, "prompt": prompt}))


def job_data() -> st.SearchStrategy[bytes]:
    """A job's data: mostly our own call, compressed."""
    calls = st.one_of(
        st.one_of(SOUND, REQUESTS).map(lambda request: [FUNCTION_NAME, None, [request], {}]),
        st.tuples(TEXTS, VALUES, VALUES, VALUES).map(list),
        VALUES,
    )
    packed = st.one_of(calls.map(as_json), mutated(calls.map(as_json))).map(zlib.compress)
    return st.one_of(packed, mutated(packed), st.binary(max_size=60))


MSGPACK_NUMBERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats())
MSGPACK = st.recursive(
    st.one_of(st.none(), st.booleans(), MSGPACK_NUMBERS, TEXTS, st.binary(max_size=40)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=10,
)


def packb(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def result_data() -> st.SearchStrategy[bytes]:
    """A stored result: mostly a map with our letters, compressed."""
    maps = st.fixed_dictionaries(
        {"o": st.sampled_from(["ok", "failed", "canceled"]), "e": st.just("chat")},
        optional={
            **{letter: MSGPACK for letter in "cmtfuxwabnlrkijh"},
            "i": st.lists(st.integers(-1, 9), max_size=3) | MSGPACK,
            "k": st.lists(st.lists(TEXTS, min_size=3, max_size=3), max_size=2) | MSGPACK,
            "d": st.lists(
                st.dictionaries(st.sampled_from("tfrkil"), MSGPACK, max_size=3), max_size=3
            ),
        },
    ).map(packb)
    packed = st.one_of(maps, mutated(maps), MSGPACK.map(packb)).map(zlib.compress)
    return st.one_of(packed, mutated(packed), st.binary(max_size=60))


BLOCK = encoded(make_block())
(HEADER_BYTES,) = struct.unpack_from("<I", BLOCK, 12)
FIELDS: dict[str, Any] = msgpack.unpackb(BLOCK[32 : 32 + HEADER_BYTES])
PAYLOAD = BLOCK[-(-(32 + HEADER_BYTES) // 64) * 64 : -16]


def _with_header(header: bytes) -> bytes:
    prefix = BLOCK[:12] + struct.pack("<IQQ", len(header), len(PAYLOAD), 0)
    content = prefix + header + bytes(-(32 + len(header)) % 64) + PAYLOAD
    return content + PLAIN.seal((content,))


def block_data() -> st.SearchStrategy[bytes]:
    """A block: mostly a real one with another header."""
    row = st.one_of(
        st.tuples(
            st.integers(-2, 3),
            TEXTS,
            st.sampled_from(["uint32", "uint8", "float16", "O"]),
            st.lists(st.integers(-1, 2**40) | st.integers(0, 8), max_size=9),
            st.sampled_from([0, 64, 1, 2**63]),
            st.integers(0, 2**64 - 1) | st.sampled_from([24, 3]),
        ).map(list),
        MSGPACK,
        st.sampled_from(FIELDS["tensors"]),
    )
    changes = st.fixed_dictionaries(
        {}, optional={**dict.fromkeys(FIELDS, MSGPACK), "tensors": st.lists(row, max_size=3)}
    )
    headers = changes.map(lambda c: packb({**FIELDS, **c}))
    made = st.one_of(headers, mutated(headers)).map(_with_header)
    return st.one_of(made, mutated(made), mutated(st.just(BLOCK)), st.binary(max_size=120))


PIECES = re.split(r"(<[^>]*>|\[[A-Z_]+\]|[{}\[\],:\"])", "".join(CALLS.values()))
MORE_PIECES = ("<think>", "</think>", "<|channel>thought", "<channel|>", "<|end|>", "analysis")


def answer_data() -> st.SearchStrategy[bytes]:
    """An output: calls and thoughts of all kinds of models, in pieces and mixed."""
    pieces = st.lists(st.sampled_from([*PIECES, *MORE_PIECES]) | TEXTS, max_size=30)
    whole = st.lists(st.sampled_from([*CALLS.values(), *MORE_PIECES]) | TEXTS, max_size=4)
    texts = st.one_of(pieces, whole).map("".join)
    made = texts.map(lambda text: text.encode("utf-8", "replace"))
    return st.one_of(made, mutated(made))


KNOWN_SCHEMAS = st.sampled_from([one for group in KEYWORDS.values() for one in group])
MIXED_SCHEMAS = st.recursive(
    KNOWN_SCHEMAS | st.sampled_from([*UNSUPPORTED.values(), {"$ref": "#"}, True, False]),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.just(2)}),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(TEXTS, inner, max_size=3)},
            optional={"required": st.lists(TEXTS, max_size=2), "additionalProperties": inner},
        ),
        *(
            st.fixed_dictionaries({name: st.lists(inner, min_size=1, max_size=3)})
            for name in ("anyOf", "allOf", "oneOf", "prefixItems")
        ),
    ),
    max_leaves=6,
)
PATTERNS = st.recursive(
    st.sampled_from(["a", "[b-d]", ".", "\\d", "é", "\\w", "^", "$", "\\n", "(?i:x)", '"', "\\b"]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,90}", "??"])),
    ),
    max_leaves=8,
)
PARTS = ('"a"', "rest", "/[0-9]+/", "rest*", '("b" | rest){1,3}', '%json {"type": "null"}')
LARK = st.builds("start: {} {}\nrest: {}\n".format, *[st.sampled_from(PARTS)] * 3)


@st.composite
def grammar_data(draw: st.DrawFn) -> bytes:
    """A kind, a value that is mostly of that kind, and a number to draw an answer with."""
    kind, values = draw(
        st.sampled_from(
            [
                ("json_schema", MIXED_SCHEMAS),
                ("json_schema", VALUES),
                ("regex", PATTERNS),
                ("regex", TEXTS),
                ("choice", st.lists(TEXTS, max_size=4)),
                ("grammar", LARK),
                ("grammar", TEXTS),
                ("json_object", st.none()),
            ]
        )
    )
    return json.dumps([kind, draw(values), draw(st.integers(0, 2**32))]).encode()


SHAPES = {
    "grammar": grammar_data(),
    "answer": answer_data(),
    "lines": input_files(),
    "job": job_data(),
    "result": result_data(),
    "block": block_data(),
}
