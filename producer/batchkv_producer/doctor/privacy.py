"""Takes out of a text what a person would not paste into a public thread.

The checks write their sentences without private facts. This is the second line of defence, for
messages of other programs that they repeat.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from batchkv_producer.doctor.machine import Machine

MIN_NAME_CHARS = 2
# Names that many machines share tell nothing, and stand in sentences of their own.
_COMMON_USERS = frozenset(
    {"root", "user", "admin", "batchkv", "worker", "cache", "default", "queue"}
)
_COMMON_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_AUTHORITY = re.compile(r"[\w+.-]+://(?:(.*)@)?([^/@?]*)", re.DOTALL)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")
_USERS_FOLDER = re.compile(r"(/Users|/home)/[^/\s:;,]+")

Rule = tuple[re.Pattern[str], str]


def rules(machine: Machine, urls: Iterable[str] = ()) -> tuple[Rule, ...]:
    """What to replace: the home folder, the user, this host, and what is in the URLs."""
    found: list[Rule] = []
    for url in urls:
        found += _rules_of_url(url)
    home = str(machine.user_home)
    if home != "/":
        found.append((re.compile(rf"{re.escape(home)}(?![\w.-])"), "~"))
    found.append((_USERS_FOLDER, r"\1/USER"))
    found.append((_CREDENTIALS, "***@"))
    host = socket.gethostname()
    names = {host, host.partition(".")[0]} - _COMMON_HOSTS
    found += [_word(name, "HOST") for name in sorted(names, key=len, reverse=True)]
    found += [_word(name, "USER") for name in _users(machine) - _COMMON_USERS]
    return tuple(found)


def scrubbed(text: str, found: Sequence[Rule]) -> str:
    """The text after all replacements."""
    for pattern, instead in found:
        text = pattern.sub(instead, text)
    return text


def _word(name: str, instead: str) -> Rule:
    if len(name) < MIN_NAME_CHARS:
        return re.compile(r"(?!)"), ""
    pattern = rf"(?<![\w-]){re.escape(name)}(\.local)?(?![\w-])"
    return re.compile(pattern, re.IGNORECASE), instead


def _users(machine: Machine) -> set[str]:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # no such user in a container
        name = ""
    return {name, machine.environ.get("USER", ""), machine.user_home.name}


def _rules_of_url(url: str) -> list[Rule]:
    """User, password and host. A password may hold what else would end it."""
    found = _AUTHORITY.match(url)
    if found is None:
        return []
    user, _, password = (found[1] or "").partition(":")
    secrets = [part for part in (password, user) if part]
    secrets += [unquote(part) for part in secrets]
    named = [(re.compile(re.escape(part)), "***") for part in dict.fromkeys(secrets)]
    host = re.sub(r":\d+$", "", found[2]).strip("[]")
    if host and host.lower() not in _COMMON_HOSTS:
        named.append((re.compile(re.escape(host), re.IGNORECASE), "HOST"))
        short = host.partition(".")[0]
        if not short.isdigit():
            named.append(_word(short, "HOST"))
    return named
