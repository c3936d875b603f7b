"""``batchkv cache why``: explains which blocks of a job's prompt the shared cache had, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from batchkv_cache_store.cli.text import print_fields, print_json, say
from batchkv_cache_store.cli.tiers import cache_options, open_cache
from batchkv_cache_store.keys import BLOCK_TOKENS, KEY_BYTES
from batchkv_producer.cli.shared import session, url_option
from batchkv_producer.errors import WireError
from batchkv_producer.wire.job import Result
from batchkv_worker.prefix.explain.why import Explanation, from_look, from_result, missing_block
from batchkv_worker.prefix.explain.why_look import Look

EXIT_UNANSWERED = 1


@click.command()
@click.argument("job_id", metavar="JOB_ID")
@url_option
@cache_options
@click.pass_context
def why_command(
    ctx: click.Context,
    job_id: str,
    url: str | None,
    cache_text: str | None,
    only: str | None,
    as_json: bool,
) -> None:
    """Explain why the cache did not have more of a job's prompt.

    If the job's result does not say why, the heads of all blocks are read. The exit code is 1 if
    the job has not ended, or has failed.

    \b
    Examples:
      batchkv cache why 3f2a9c51d07be684-17
      batchkv cache why 3f2a9c51d07be684-17 --tier disk --json
    """
    result = _ended(url, job_id)
    if result is None:
        ctx.exit(EXIT_UNANSWERED)
    explanation = from_result(result)
    if explanation is not None:
        _print(job_id, result, explanation, as_json)
        return
    assert result.note is not None
    look = Look(result.note)
    with open_cache(cache_text, only) as cache:
        for place in cache.places:
            with cache.reporting(place):
                look.add(str(place), place.tier)
        if len(cache.failed) == len(cache.places):
            return  # without a tier there is no explanation
        look.is_partial = look.is_partial or bool(cache.failed)
        if look.is_partial:
            say(f"read: at most {look.max_items:,} objects of each tier, and none of failing tiers")
        _print(job_id, result, from_look(result, look), as_json, look)


def _ended(url: str | None, job_id: str) -> Result | None:
    """The result of a job with an answer. For another job, print a sentence and return None."""
    with session(url) as opened:
        found = opened.client.result(job_id)
        if found is None:
            say(f"no result yet: job {job_id} is {opened.client.job(job_id).status}")
        elif found.outcome != "ok":
            code = f" ({found.error[0]})" if found.error else ""
            say(f"job {job_id} has no answer to explain: it is {found.outcome}{code}")
            found = None
    note = found.note if found is not None else None
    if note is not None and len(note.key) not in (0, KEY_BYTES):
        raise WireError(f"the cache note in the result of job {job_id} cannot be read")
    return found


def _print(
    job_id: str, result: Result, found: Explanation, as_json: bool, look: Look | None = None
) -> None:
    said = _facts(job_id, result)
    if as_json:
        is_partial = look is not None and look.is_partial
        print_json(said | asdict(found) | {"is_partial": is_partial})
        return
    blocks = said["blocks"] or {}
    missing = said["missing"]
    print_fields(
        [
            ("job", job_id),
            ("worker", result.worker or None),
            ("model", result.model or None),
            ("prompt tokens", result.usage.prompt),
            ("cached tokens", result.usage.cached),
            ("blocks", blocks.get("wanted")),
            ("  from the worker's memory", blocks.get("local")),
            ("  from the store", blocks.get("found")),
            ("  computed", blocks.get("computed")),
            ("first missing", missing and f"block {missing['block']}, from token "
             f"{missing['token']:,}: {missing['key']}"),
            ("why", found.sentence),
        ]
    )  # fmt: skip


def _facts(job_id: str, result: Result) -> dict[str, Any]:
    """The facts in the result, for JSON, without marks of tokens, which depend on the prompt."""
    note = result.note
    blocks = missing = None
    if note is not None:
        block = missing_block(note)
        blocks = {
            "wanted": note.wanted,
            "local": note.local,
            "found": note.found,
            "computed": note.wanted - block,
        }
        if note.key:
            missing = {
                "block": block,
                "token": block * BLOCK_TOKENS,
                "key": note.key.hex(),
                "parent": note.parent.hex(),
            }
    return {
        "job_id": job_id,
        "worker": result.worker,
        "model": result.model,
        "prompt_tokens": result.usage.prompt,
        "cached_tokens": result.usage.cached,
        "namespace": note.namespace.hex() if note is not None else None,
        "blocks": blocks,
        "missing": missing,
        "stop": note.stop if note is not None else None,
    }
