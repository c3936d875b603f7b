"""Opens the tiers for the cache commands, and reports failing ones.

Tiers are opened as a guest, so that commands make and evict nothing. A failing tier is reported on
standard error and in the exit code; the other tiers are still used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import click

from batchkv_cache_store.blocks.seal import Sealer
from batchkv_cache_store.cli.text import KEY_DIGITS, say
from batchkv_cache_store.errors import TierError, TierMisconfigured
from batchkv_cache_store.opening import CACHE_VARIABLE, parse_tiers, read_cache, read_secret
from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.tiers.spec_types import TierSpec
from batchkv_cache_store.upkeep.contents import find_names

EXIT_DAMAGE = 1
EXIT_USAGE = 2
EXIT_REDIS = 3
EXIT_TROUBLE = 4
MIN_DIGITS = 4
_MAX_CANDIDATES = 8
_HEX = re.compile(r"[0-9a-f]{1,64}")
_Command = TypeVar("_Command", bound=Callable[..., None])


def cache_options(command: _Command) -> _Command:
    """``--cache``, ``--tier`` and ``--json``, as ``cache_text``, ``only`` and ``as_json``."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--tier",
            "only",
            type=click.Choice(["disk", "redis", "objects"]),
            help="Use only this tier.",
        ),
        click.option(
            "--cache",
            "cache_text",
            metavar="TIERS",
            help=f"The tiers, as the workers have them. Better set {CACHE_VARIABLE}, or name a "
            f"file in {CACHE_VARIABLE}_FILE, because others can see a password in a command line.",
        ),
    ):
        command = option(command)
    return command


class Place:
    """The address of a tier, which is opened at its first use."""

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self._tier: Tier | None = None

    def __str__(self) -> str:
        return str(self.spec)

    @property
    def tier(self) -> Tier:
        """The opened tier; raises TierMisconfigured if it cannot be used."""
        if self._tier is None:
            self._tier = self.spec.open(as_guest=True)
        return self._tier

    def close(self) -> None:
        """Close the tier, if it is open."""
        if self._tier is not None:
            self._tier.close()


@dataclass(slots=True)
class OpenCache:
    """The tiers of a command, and its exit code so far."""

    places: list[Place]
    exit_code: int = 0
    failed: list[Place] = field(default_factory=list)

    @contextmanager
    def reporting(self, place: Place) -> Iterator[None]:
        """Inside the block, a failing tier ends it, is reported, and sets the exit code."""
        try:
            yield
        except TierError as fault:
            say(f"{place}: {fault}")
            code = EXIT_REDIS if place.spec.kind == "redis" else EXIT_TROUBLE
            self.exit_code = EXIT_USAGE if isinstance(fault, TierMisconfigured) else code
            self.failed.append(place)

    def find(self, text: str) -> tuple[str, dict[str, list[Place]]]:
        """(64 digits, places by name) of the key or namespace that begins with these digits.

        Raises ClickException if there is none, or more than one.
        """
        digits = checked_digits(text)
        found: dict[str, list[Place]] = {}
        for place in self.places:
            with self.reporting(place):
                for name in find_names([place.tier], digits):
                    found.setdefault(name, []).append(place)
        return only_one(digits, found), found


@contextmanager
def open_cache(cache_text: str | None, only: str | None) -> Iterator[OpenCache]:
    """Open the tiers of ``--cache`` or the environment. The command ends with their exit code."""
    try:
        text = cache_text or read_cache(os.environ)
        if text is None:
            raise click.ClickException(
                f"no cache is set: give --cache or set {CACHE_VARIABLE} to the workers' tiers, "
                "like disk:~/.batchkv/blocks"
            )
        specs = [spec for spec in parse_tiers(text) if spec.kind != "memory"]
    except ValueError as fault:
        raise click.ClickException(str(fault)) from None
    if not specs:
        raise click.ClickException(
            "this cache has only a memory: tier, which cannot be read from outside of its worker"
        )
    chosen = [spec for spec in specs if only in (None, spec.kind)]
    if not chosen:
        raise click.ClickException(f"this cache has no {only} tier")
    opened = OpenCache([Place(spec) for spec in chosen])
    try:
        yield opened
    finally:
        for place in opened.places:
            place.close()
    click.get_current_context().exit(opened.exit_code)


def sealer() -> Sealer:
    """A sealer with the secret in the environment, if there is one."""
    try:
        return Sealer(read_secret(os.environ))
    except ValueError as fault:
        raise click.ClickException(str(fault)) from None


def checked_digits(text: str) -> str:
    """The first hex digits of a key or a namespace; ClickException for any other text."""
    digits = text.lower().partition(".")[0]
    if not _HEX.fullmatch(digits) or len(digits) < MIN_DIGITS:
        raise click.ClickException(f"{text!r} is not {MIN_DIGITS} to 64 hexadecimal digits")
    return digits


def only_one(digits: str, names: Sequence[str] | dict[str, list[Place]]) -> str:
    """The 64 digits that all these names begin with; ClickException if none or several match."""
    keys = sorted({name.partition(".")[0] for name in names})
    if not keys:
        raise click.ClickException(f"no name in the cache begins with {digits}")
    if len(keys) > 1:
        length = max(KEY_DIGITS, len(digits) + 4)
        shown = ", ".join(key[:length] for key in keys[:_MAX_CANDIDATES])
        more = ", ..." if len(keys) > _MAX_CANDIDATES else ""
        raise click.ClickException(f"{digits} matches {len(keys):,} names: {shown}{more}")
    return keys[0]
