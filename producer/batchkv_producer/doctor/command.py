"""``batchkv doctor``: examines this machine, and on request a model, a server and the cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import click

from batchkv_producer.errors import UsageError

if TYPE_CHECKING:
    from batchkv_producer.doctor.contract import Finding
    from batchkv_producer.doctor.examine import Wanted
    from batchkv_producer.doctor.machine import Machine

EXIT_FAILED = 1
STRESS_SECONDS = 120.0


@click.command()
@click.option(
    "-m",
    "--model",
    "models",
    metavar="MODEL",
    multiple=True,
    help="Check this model here, too. Of several: also whether they fit together.",
)
@click.option("--kv-scheme", metavar="SCHEME", default="", help="Check this KV scheme as well.")
@click.option(
    "--url",
    metavar="URL",
    help="Check this server of a queue, too.  [the one that BATCHKV_REDIS_URL or "
    "BATCHKV_REDIS_URL_FILE names]",
)
@click.option(
    "--cache",
    metavar="TIERS",
    help="Check these tiers of the cache, too.  [those of BATCHKV_CACHE or BATCHKV_CACHE_FILE]",
)
@click.option("--stress", is_flag=True, help="Load the device for two minutes, and compare tokens.")
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(5, 86_400),
    help=f"How long --stress lasts.  [{STRESS_SECONDS:.0f}]",
)
@click.option("--fix", "is_fix", is_flag=True, help="Mend batchkv's own files; say each change.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; it names no person and no machine."
)
@click.pass_context
def doctor(
    ctx: click.Context,
    models: tuple[str, ...],
    kv_scheme: str,
    url: str | None,
    cache: str | None,
    stress: bool,
    seconds: float | None,
    is_fix: bool,
    as_json: bool,
) -> None:
    """Examine this machine, and say what to do.

    It looks for what would keep batchkv from working well. Without -m, --url
    and --stress it ends within 30 seconds. Only --fix mends something, and
    only batchkv's own files. -m keeps what it measures, as a worker
    does. Exit code 0: all is well, or there are warnings. 1: some check failed.

    \b
    Examples:
      batchkv doctor
      batchkv doctor -m mlx-community/Qwen3-4B-4bit
      batchkv doctor --url redis://studio.local:6379 --json
      batchkv doctor --stress -m demo --seconds 60
    """
    # Imported here, so that other commands start fast.
    from batchkv_producer.doctor import examine, show
    from batchkv_producer.doctor.machine import Machine
    from batchkv_producer.doctor.privacy import rules

    wanted = _wanted(models, kv_scheme, url, cache, stress, seconds)
    machine = Machine()
    fixed = list(_mend(machine, say=not as_json)) if is_fix else []
    findings: list[Finding] = []
    for finding in examine.examine_all(wanted, machine):
        findings.append(finding)
        if not as_json:
            show.show(finding)
    if as_json:
        hidden = rules(machine, [wanted.url, *wanted.cache.split()])
        done = [what for what, is_done in fixed if is_done]
        click.echo(show.as_json(findings, machine, own_version(), hidden, done))
    else:
        click.echo(f"\n{show.summary(findings)}")
    if show.has_failed(findings) or not all(done for _, done in fixed):
        ctx.exit(EXIT_FAILED)


def _wanted(
    models: tuple[str, ...],
    kv_scheme: str,
    url: str | None,
    cache: str | None,
    stress: bool,
    seconds: float | None,
) -> Wanted:
    """Check the flags and the environment; raises UsageError."""
    from batchkv_producer.doctor.examine import Wanted
    from batchkv_producer.server import connection

    if seconds is not None and not stress:
        raise UsageError("--seconds is how long --stress lasts: add --stress")
    if kv_scheme and not models:
        raise UsageError("--kv-scheme is checked on a model: add -m MODEL")
    if models:
        from batchkv_producer.local.worker_checks import check_model_folder

        for model in models:
            check_model_folder(model)
    tiers, faults = cache or "", []
    try:
        tiers = _tiers_of_environment() if cache is None else cache
    except UsageError as fault:  # a finding: a doctor is run when something is wrong
        faults.append(("cache", str(fault)))
    server = ""
    try:
        server = connection.resolve_url(url) or ""
    except UsageError as fault:
        faults.append(("queue server", str(fault)))
    return Wanted(
        models or (("demo",) if stress else ()),
        kv_scheme,
        server,
        "" if tiers.strip() == "off" else tiers,
        (seconds or STRESS_SECONDS) if stress else 0.0,
        is_stress_alone=not models,
        faults=tuple(faults),
    )


def _tiers_of_environment() -> str:
    text = os.environ.get("BATCHKV_CACHE", "").strip()
    path = os.environ.get("BATCHKV_CACHE_FILE", "").strip()
    if text or not path:
        return text
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return file.read(65_536).strip()
    except (OSError, UnicodeDecodeError) as fault:
        problem = getattr(fault, "strerror", None) or "it is not text"
        raise UsageError(f"BATCHKV_CACHE_FILE names {path}: {problem}") from fault


def _mend(machine: Machine, *, say: bool) -> Iterator[tuple[str, bool]]:
    """Make the changes; (what, was it done) of each."""
    from batchkv_producer.doctor.fixes import apply_fixes, find_fixes

    for what, why_not in apply_fixes(find_fixes(machine)):
        if say:
            click.echo(
                f"fixed: {what}" if not why_not else f"could not {what}: {why_not}",
                err=bool(why_not),
            )
        yield what, not why_not
    sys.stdout.flush()


def own_version() -> str:
    """The version that is installed; empty if pip does not know."""
    try:
        return version("batchkv")
    except PackageNotFoundError:
        return ""
