"""Connects commands to Redis, and turns every error of Redis into one sentence.

The URL is the ``--url`` flag, else ``BATCHKV_REDIS_URL``, else the content of the file that
``BATCHKV_REDIS_URL_FILE`` names, else the embedded server's (``embedded``). Messages never contain
a password.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.connection import SSLConnection
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    MaxConnectionsError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from batchkv_producer.disk import full_home, ping, takes_no_writes
from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.server import embedded as server
from batchkv_producer.server.binary import MIN_VERSION
from batchkv_producer.server.home import home_from_environment
from batchkv_producer.server.memory_use import full_sentence, is_full

URL_VARIABLE = "BATCHKV_REDIS_URL"
URL_FILE_VARIABLE = "BATCHKV_REDIS_URL_FILE"
CA_VARIABLE = "BATCHKV_REDIS_CA_FILE"
SCHEMES = ("redis://", "rediss://", "unix://")
GATEWAY_SCHEMES = ("http://", "https://")
BY_GATEWAY = (
    "run, submit, results, result, report, status, wait, cancel, retry, failed, forget, list and "
    "workers"
)

MAX_URL_CHARS = 4096
PROBE_CONNECT_SECONDS = 0.8  # so a missing server is reported within a second
PROBE_REPLY_SECONDS = 3.0
CONNECT_SECONDS = 5.0
REPLY_SECONDS = 60.0  # longer than any script of batchkv or a busy disk delays a reply

Warn = Callable[[str], None]


def resolve_url(url: str | None) -> str | None:
    """The URL of the flag, else of the environment. None means the embedded server.

    If the environment names a file with the authority's certificate, the URL contains its path.
    """
    found = _named_url(url)
    return None if found is None else _with_authority(found)


def is_gateway(url: str | None) -> bool:
    """Whether a URL names a gateway, not a Redis."""
    return url is not None and url.strip().lower().startswith(GATEWAY_SCHEMES)


def refuse_gateway(url: str | None) -> None:
    """Raise UsageError for the URL of a gateway, where only Redis will do."""
    if url is not None and is_gateway(url):
        raise UsageError(
            f"this needs the Redis URL, and {masked(url)} is a gateway, which serves only "
            f"{BY_GATEWAY}: give the Redis URL, or leave it out for the server of this machine"
        )


def _with_authority(url: str) -> str:
    if is_gateway(url):  # it has a variable of its own
        return url
    path = os.environ.get(CA_VARIABLE, "").strip()
    if not path or "ssl_ca_certs=" in url:
        return url
    if not url.startswith("rediss://"):
        raise UsageError(
            f"{CA_VARIABLE} is set, but {masked(url)} does not use TLS: use a rediss:// URL, or "
            f"unset {CA_VARIABLE}"
        )
    file = Path(path).expanduser().absolute()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as fault:
        raise UsageError(f"{CA_VARIABLE} names {path}, which has no certificate (PEM)") from fault
    except OSError as fault:
        raise UsageError(f"{CA_VARIABLE} names {path}: {fault.strerror}") from fault
    return f"{url}{'&' if '?' in url else '?'}ssl_ca_certs={quote(str(file))}"


def _named_url(url: str | None) -> str | None:
    if url:
        return url
    from_variable = os.environ.get(URL_VARIABLE, "").strip()
    path = os.environ.get(URL_FILE_VARIABLE, "").strip()
    if from_variable and path:
        raise UsageError(f"{URL_VARIABLE} and {URL_FILE_VARIABLE} are both set: unset one")
    if from_variable:
        return from_variable
    if not path:
        return None
    try:
        path = str(Path(path).expanduser())
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            found = file.read(MAX_URL_CHARS).strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as fault:
        kinds = {UnicodeDecodeError: "it is not text", RuntimeError: "there is no such user"}
        problem = getattr(fault, "strerror", None) or kinds.get(type(fault), str(fault))
        raise UsageError(f"{URL_FILE_VARIABLE} names {path}: {problem}") from fault
    if not found:
        raise UsageError(f"{URL_FILE_VARIABLE} names {path}, which is empty: write the URL into it")
    # Others may read a URL without a password. They may never change it.
    if stat.S_IMODE(mode) & (0o077 if "@" in found else 0o022):
        raise UsageError(
            f"{URL_FILE_VARIABLE} names {path}, which others may open: run `chmod 600 {path}`"
        )
    return found


def url_in_use(url: str | None) -> str:
    """The URL of ``resolve_url``, or of the embedded server, which is started if needed."""
    found = resolve_url(url)
    refuse_gateway(found)
    return found or server.ensure_running(home_from_environment())


def connect(url: str | None, warn: Warn | None = None) -> Redis:
    """A connection that was tested, with replies as bytes. ServerError says why there is none.

    ``warn`` gets a sentence about settings under which the server may lose jobs.
    """
    resolved = url_in_use(url)
    with server_errors(resolved):
        _probe(resolved, warn or (lambda _: None))
    return _client(
        resolved,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=REPLY_SECONDS,
        socket_keepalive=None if resolved.startswith("unix://") else True,
        # About four seconds in all: enough for a server that restarts. Timeouts are not retried:
        # seven of them would take seven minutes.
        retry=Retry(ExponentialWithJitterBackoff(base=0.1, cap=1.0), 6, (ConnectionError,)),
    )


def masked(url: str) -> str:
    """The URL without its password, and without a user name that may be a password."""
    if "://" not in url:
        return url.rpartition("@")[2]
    url = re.sub(r"(?<=://)([^/@:]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    url = re.sub(r"^((?:redis|rediss)://)[^:@]*@", r"\1***@", url)
    url = re.sub(r"(?<=://)[^/:@]+@", "***@", url)
    return re.sub(r"(?<=[?&]password=)[^&]*", "***", url)


@contextmanager
def server_errors(url: str) -> Iterator[None]:
    """Inside, every error of Redis becomes a ServerError that says what to do about it."""
    try:
        yield
    except RedisError as fault:
        if takes_no_writes(fault) and is_embedded(url):
            raise full_home(home_from_environment().path, str(fault)) from fault
        raise ServerError(explain(fault, url)) from fault


def refused_writes(connection: Redis, url: str) -> str:
    """A sentence if the server's disk is full, else an empty text.

    Raises FullHomeError if it is the embedded server, whose disk is on this machine.
    """
    try:
        connection.ping()
    except ResponseError as fault:
        if not takes_no_writes(fault):
            raise
        if is_embedded(url):
            raise full_home(home_from_environment().path, str(fault)) from fault
        return explain(fault, url)
    return ""


def is_embedded(url: str) -> bool:
    """Whether this is the URL of the home folder's server."""
    return url.startswith("unix://") and url == home_from_environment().url


# macOS 15 and newer keep programs that launchd starts for a user off the local network. Connections
# fail at once with EHOSTUNREACH, and names ending in .local may not resolve.
_LOCAL_NETWORK = (
    "If the same command works in a Terminal, macOS keeps this program off the local network: "
    "allow it in System Settings > Privacy & Security > Local Network, or install the worker as a "
    "daemon, which needs no permission (sudo batchkv service install worker --daemon). If it "
    "fails there too,"
)
_FAULTS_OF_MACS = (
    (
        r"Error 65 connecting to ",
        f"cannot be reached: there is no route to it (errno 65). {_LOCAL_NETWORK} the machine is "
        "off, asleep or in another network",
    ),
    (
        r"(?i)connecting to [^ ]*\.local:.*nodename nor servname",
        f"cannot be found: the name does not resolve. {_LOCAL_NETWORK} check the name, or use the "
        "address",
    ),
)


def explain(fault: RedisError, url: str, platform: str = sys.platform) -> str:
    """One line that names the server, its problem, and the remedy."""
    text = " ".join(str(fault).split())
    if platform == "darwin" and isinstance(fault, ConnectionError):
        for pattern, sentence in _FAULTS_OF_MACS:
            if re.search(pattern, text):
                return f"Redis at {masked(url)} {sentence}"
    if is_full(fault):
        return f"Redis at {masked(url)} {full_sentence(text)}"
    for kinds, pattern, sentence in _FAULTS:
        if isinstance(fault, kinds) and re.search(pattern, text):
            if sentence is _NOT_ALLOWED:
                sentence = _OF_ROLES.get(urlsplit(url).username or "", sentence)
            return f"Redis at {masked(url)} {sentence}"
    return f"Redis at {masked(url)} answers with an error: {text[:300]}"


_ANY: tuple[type[Exception], ...] = (RedisError,)
_AUTH = (AuthenticationError, AuthorizationError, AuthenticationWrongNumberOfArgsError)
_NO_ANSWER = (
    "does not answer: is the address right, the machine awake, and is it Redis? The URL of a "
    "gateway begins with http://"
)
_NO_CONNECTION = "accepts no more connections (maxclients): end other clients, or raise maxclients"
_OLDER = (
    "the hub's users are older than this batchkv: run deploy/hub/setup.sh of this version there "
    "and start the hub again (deploy/README.md, Upgrade)"
)
_NOT_ALLOWED = (
    "does not let this user do that (NOPERM): use the URL of the right role, producer, worker or "
    f"admin. If the role is right, {_OLDER}"
)
# By the users of a hub, whose URLs are files of its folder secrets.
_OF_ROLES = {
    "worker": "does not let its user worker do that (NOPERM): it may run workers, and not submit, "
    "read or change batches. For these use the hub's producer.url or admin.url. If a worker says "
    f"so, {_OLDER}",
    "producer": "does not let its user producer do that (NOPERM): it may submit, read and change "
    "batches, and not run workers. A worker needs the hub's worker.url, and `batchkv run` its "
    f"admin.url. If another command says so, {_OLDER}",
}
# The first entry that fits is used. An error inside a script keeps its code, not always its class.
_FAULTS: tuple[tuple[tuple[type[Exception], ...], str, str], ...] = (
    (_ANY, "NOAUTH|Authentication required|HELLO must be called", "wants a password: put it into "
     "the URL (redis://:PASSWORD@host:6379/0), best in the file of BATCHKV_REDIS_URL_FILE"),
    (_ANY, "WRONGPASS|invalid password|invalid username-password|without any password", "refuses "
     "the password or user of the URL: correct it"),
    ((*_AUTH, NoPermissionError), "", _NOT_ALLOWED),
    (_ANY, "NOPERM|ACL failure|No permissions", _NOT_ALLOWED),
    ((ReadOnlyError,), "", "is a read-only replica: use the URL of its primary"),
    (_ANY, "READONLY", "is a read-only replica: use the URL of its primary"),
    (_ANY, "MISCONF", "cannot write to its disk and refuses writes (MISCONF): free space there. "
     "Its log has more"),
    (_ANY, "NOREPLICAS", "has too few replicas to accept writes (min-replicas-to-write): start "
     "them, or lower that setting"),
    ((BusyLoadingError,), "", "is still loading its data: try again in a moment"),
    (_ANY, "MASTERDOWN", "is a replica that has lost its primary: use the URL of the primary"),
    (_ANY, "MOVED|CLUSTERDOWN|CROSSSLOT", "is a cluster, which batchkv does not support: use a "
     "single server"),
    (_ANY, "unknown command", "does not know a command that batchkv needs: use Redis 6.2 or newer, "
     "or Valkey"),
    ((MaxConnectionsError,), "", _NO_CONNECTION),
    (_ANY, "max number of clients", _NO_CONNECTION),
    (_ANY, "protected mode", "is in protected mode and refuses other machines: set a password and "
     "a bind address there"),
    ((TimeoutError,), "", _NO_ANSWER),
    ((ConnectionError,), "certificate has expired", "has a certificate that has expired: renew it "
     "there"),
    ((ConnectionError,), "(?i)(hostname|ip address) mismatch|not valid for", "has a certificate "
     "for another name: use the name in the URL that the certificate is for"),
    ((ConnectionError,), "(?i)self.signed|issuer certificate", "has a certificate that no "
     "authority known here has signed: name your authority's file in BATCHKV_REDIS_CA_FILE"),
    ((ConnectionError,), "CERTIFICATE|SSL|TLS", "cannot be reached over TLS: check the URL "
     "(redis:// or rediss://) and the certificate"),
    ((ConnectionError,), "(?i)closed by server|reset by peer|broken pipe", "closed the "
     "connection: was it stopped? A rediss:// server also does so with redis://"),
    ((ConnectionError,), "(?i)name or service|nodename|name resolution|getaddrinfo", "cannot be "
     "found: there is no machine by that name"),
    ((ConnectionError,), "(?i)timed? ?out", _NO_ANSWER),
    ((ConnectionError,), "", "cannot be reached: is it running there? Without --url and "
     "BATCHKV_REDIS_URL batchkv starts one of its own"),
)  # fmt: skip


def _client(url: str, **settings: Any) -> Redis:
    refuse_gateway(url)
    if not url.startswith(SCHEMES):
        schemes = ", ".join(SCHEMES)
        raise UsageError(
            f"Redis URL {masked(url)} must begin with one of {schemes}; that of a gateway begins "
            "with http:// or https://"
        )
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        _refuse_unknown(url)
        # The error's text may contain the password, so it is not shown.
        return Redis.from_url(url, decode_responses=False, **settings)
    except (ValueError, TypeError):
        message = f"Redis URL {masked(url)} cannot be read: it must be SCHEME://HOST:PORT/DB"
    raise UsageError(message)


# What may stand behind "?" in a URL. Others reach the client only when it first connects.
_PARAMETERS = (
    *("db", "username", "password", "client_name", "protocol", "health_check_interval"),
    *("socket_timeout", "socket_connect_timeout", "retry_on_timeout", "max_connections"),
    *("encoding", "encoding_errors", "lib_name", "lib_version"),
)


def _refuse_unknown(url: str) -> None:
    """Raise UsageError for a parameter that is not known, or a database that is no number."""
    parts = urlsplit(url)
    known = list(_PARAMETERS)
    if parts.scheme != "unix":
        known.append("socket_keepalive")
    of_tls = [name for name in signature(SSLConnection).parameters if name.startswith("ssl_")]
    if parts.scheme == "rediss":
        known += of_tls
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            if "@" in parts.query:  # what stands there is a part of the password
                raise UsageError(
                    f"Redis URL {masked(url)} cannot be read: in a password, ? is written %3F, "
                    "# is %23, / is %2F and @ is %40"
                )
            hint = ". TLS needs rediss://" if name in of_tls else ""
            raise UsageError(
                f"Redis URL {masked(url)} has an unknown parameter {name[:40]!r}{hint}; known are "
                f"{', '.join(sorted(known))}"
            )
        if name == "protocol" and value not in ("2", "3"):
            raise UsageError(f"Redis URL {masked(url)}: protocol is 2 or 3, not {value[:40]!r}")
    database = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    if database and not (database.isascii() and database.isdecimal()):
        raise UsageError(
            f"Redis URL {masked(url)} has a database that is no number: write SCHEME://HOST:PORT/0"
        )


def _probe(url: str, warn: Warn) -> None:
    settings = {"socket_connect_timeout": PROBE_CONNECT_SECONDS}
    with _client(
        url, socket_timeout=PROBE_REPLY_SECONDS, retry=Retry(NoBackoff(), 0), **settings
    ) as connection:
        ping(connection)
        try:
            info: dict[str, Any] = connection.info()
        except NoPermissionError:
            return  # this user may not read it; the commands report what they may not do
    _refuse_old(url, str(info.get("redis_version", "")))
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        warn(
            f"Redis at {masked(url)} drops keys when it is full (maxmemory-policy {policy}), "
            "jobs among them: set it to noeviction"
        )


def _refuse_old(url: str, version: str) -> None:
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if parts and parts < MIN_VERSION:
        raise ServerError(
            f"Redis at {masked(url)} is version {version}; batchkv needs 6.2 or newer: upgrade it"
        )
