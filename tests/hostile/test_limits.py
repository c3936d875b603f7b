"""SECURITY.md names every limit in one table; here its numbers are held to the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchkv_cache_store import lookup
from batchkv_cache_store.blocks import header, manifests
from batchkv_cache_store.tiers.base import MAX_OBJECT_BYTES
from batchkv_producer.intake import checks, fields, formats, messages, prompting, rules
from batchkv_producer.results import bounded
from batchkv_producer.wire import constraint, job, transitions
from batchkv_worker.engine.tokens import text_limits as tokens
from batchkv_worker.model import loader as model
from batchkv_worker.model import trial
from support import tiny_models  # noqa: F401  (it loads the BLAS, before MLX)

TEXT = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text("utf-8")
LIMITS = header.Limits()
MIB, KIB = 2**20, 2**10


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        ("a line of the input", [formats.MAX_LINE_BYTES // MIB, prompting.MAX_SYSTEM_CHARS]),
        ("a `custom_id`", [checks.MAX_CUSTOM_ID_CHARS]),
        ("a prompt; a chat", [tokens.MAX_TOKEN_CHARS]),
        ("stop strings of a row", [checks.MAX_STOPS, checks.MAX_STOP_BYTES]),
        (
            "tools of a row",
            [messages.MAX_TOOLS, messages.MAX_VARIABLE_CHARS, checks.MAX_DEPTH],
        ),
        ("`top_logprobs`", [fields.MAX_LOGPROBS, fields.MAX_CHOICES]),
        ("token ids of a prompt", [job.MAX_PROMPT_TOKENS, job.MAX_TOKEN_ID]),
        (
            "token ids in `stop_token_ids`",
            [rules.MAX_LISTED_TOKENS, rules.MAX_BAD_WORDS, checks.MAX_STOP_BYTES],
        ),
        ("a schema, regex", [constraint.MAX_CONSTRAINT_BYTES // KIB, checks.MAX_DEPTH]),
        ("a function's name", [job.MAX_FUNCTION_CHARS, job.MAX_EFFORT_CHARS]),
        ("a job's data", [job.MAX_JOB_BYTES // MIB]),
        ("a result", [job.MAX_RESULT_BYTES // MIB]),
        ("jobs that a worker takes", [transitions.ENOUGH_BYTES // MIB]),
        ("jobs or results that a command", [bounded.ENOUGH_BYTES // MIB]),
        (
            "a model's tokenizer and chat template",
            [trial.MAX_BYTES // 2**30, int(trial.MAX_SECONDS)],
        ),
        ("layers in a model's", [model.MAX_LAYERS, model.MAX_CONFIG_BYTES // MIB]),
        ("a block; its header", [LIMITS.max_block_bytes // MIB, LIMITS.max_header_bytes // KIB]),
        (
            "tensors, tokens and dimensions",
            [LIMITS.max_tensors, LIMITS.max_tokens, header.MAX_DIMENSIONS, header.MAX_TEXT_BYTES],
        ),
        ("blocks fetched at once", [lookup.MAX_FETCH_BYTES // MIB]),
        ("any object of a tier", [MAX_OBJECT_BYTES // MIB]),
        ("a manifest", [manifests.MAX_MANIFEST_BYTES // KIB]),
    ],
)
def test_the_table_says_what_the_code_does(row: str, numbers: list[int]) -> None:
    """Each number of the table is the constant's."""
    (line,) = [line for line in TEXT.splitlines() if line.startswith(f"| {row}")]
    said = line.split("|")[2]
    found = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", said)]
    assert found == numbers
