"""A shared tier: blocks as objects in a bucket, through the S3 protocol (extra ``objects``).

It works with any S3 server: Amazon's, MinIO, Garage, Ceph. Objects are ``<prefix>1/<name>``. S3 has
no request for several objects, so several requests run at once and take the time of one.
Put-if-absent is a conditional PUT. A server that does not know it gets a plain PUT, which at worst
replaces a block by an equal one.

S3 has no size limit and no eviction. Beyond ``max_bytes`` nothing is written. A lifecycle rule of
the bucket, by age, makes room.

Wrong or slow answers of the server are TierErrors at worst.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
except ModuleNotFoundError:  # an extra; the constructor raises TierMisconfigured without it
    boto3 = Config = None
    BotoCoreError = ClientError = HTTPClientError = OSError

from batchkv_cache_store.blocks.names import checked, is_block_name, is_name
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import TierError, TierMisconfigured
from batchkv_cache_store.tiers.base import Entry, Put, Tier, TierStats, bound, size_of
from batchkv_cache_store.tiers.requests import Requests

_T = TypeVar("_T")

MAX_REQUESTS = 16  # in flight at once
RECOUNT_SECONDS = 3600.0
CONNECT_TIMEOUT_SECONDS = 3.0
READ_TIMEOUT_SECONDS = 10.0
# For a whole answer, with a body of many packets. Writes and counts run in the background.
ASK_SECONDS = 60.0
WRITE_SECONDS = 300.0
COUNT_SECONDS = 300.0
_ABSENT = {"NoSuchKey", "NotFound", "404"}
_EMPTY = {"InvalidRange", "416"}
_LOST_RACE = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_NO_CONDITIONS = {"NotImplemented", "501"}
_REFUSED = {"NoSuchBucket", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403"}


class ObjectsTier(Tier):
    """Blocks in ``bucket`` of the server at ``endpoint_url`` (None: Amazon's).

    ``client_settings`` go to boto3 (region, keys; by default boto3 looks where AWS tools look).
    Other workers may write too, so the bucket's bytes are counted again every hour. In between,
    this process adds the bytes that it writes. The first call connects.
    """

    is_far = True

    def __init__(
        self,
        bucket: str,
        max_bytes: int,
        endpoint_url: str | None = None,
        prefix: str = "batchkv/",
        **client_settings: str,
    ) -> None:
        if boto3 is None:
            raise TierMisconfigured("object storage needs boto3: pip install 'batchkv[objects]'")
        self.name = "objects"
        self.max_bytes: int = max_bytes
        self._bucket = bucket
        self._prefix = f"{prefix}1/"
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint_url,
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_SECONDS,
                read_timeout=READ_TIMEOUT_SECONDS,
                retries={"total_max_attempts": 2},
                max_pool_connections=MAX_REQUESTS,
                # Blocks have their own checksum, and not every server supports boto3's.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
            **client_settings,
        )
        self._requests = Requests(MAX_REQUESTS, "batchkv-objects")
        self._lock = threading.Lock()
        self._counted_bytes = 0
        self._counted_at: float | None = None  # None: never

    def check(self) -> None:
        """Check that the bucket answers and can be listed."""
        next(self._pages(), None)

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        return self._for_each(names, self._size)

    def get_many(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> dict[str, Buffer]:
        return self._for_each(names, lambda name: self._get(name, bound(sizes, name)))

    def get_heads(self, names: Sequence[str], num_bytes: int) -> dict[str, Buffer]:
        return self._for_each(names, lambda name: self._get_head(name, num_bytes))

    def iter_names(self) -> Iterator[Entry]:
        """List names, a thousand objects in a request."""
        for page in self._pages():
            for name, num_bytes in page:
                if is_name(name):
                    yield Entry(name, num_bytes)

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        key = self._key(name)
        if self._for_each([name], self._size):
            return Put.PRESENT
        num_bytes = size_of(buffers)
        if not self._reserve(num_bytes):
            return Put.FULL
        is_stored = False
        try:
            body = b"".join(buffers)
            is_stored = self._request(lambda: self._put_if_absent(key, body), WRITE_SECONDS)
        finally:
            if not is_stored:
                self._add(-num_bytes)
        return Put.STORED if is_stored else Put.PRESENT

    def delete(self, name: str) -> None:
        self.delete_many([name])

    def delete_many(self, names: Sequence[str]) -> None:
        for num_bytes in self._for_each(names, self._delete).values():
            self._add(-num_bytes)

    def stats(self) -> TierStats:
        """Count by listing the bucket: one request for each thousand objects."""
        return self._count()

    def close(self) -> None:
        self._requests.close()
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + checked(name)

    def _request(self, request: Callable[[], _T], limit_seconds: float | None = None) -> _T:
        with _s3_errors():
            return self._requests.run(request, limit_seconds or ASK_SECONDS)

    def _for_each(self, names: Sequence[str], request: Callable[[str], _T | None]) -> dict[str, _T]:
        for name in names:
            checked(name)
        with _s3_errors():
            answers = self._requests.map(request, names, ASK_SECONDS)
        pairs = zip(names, answers, strict=True)
        return {name: answer for name, answer in pairs if answer is not None}

    def _size(self, name: str) -> int | None:
        with _absent_is_none():
            answer = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
            return int(answer["ContentLength"])
        return None

    def _delete(self, name: str) -> int | None:
        """Delete the object. Returns its size; None if there was none."""
        num_bytes = self._size(name)
        if num_bytes is not None:
            self._client.delete_object(Bucket=self._bucket, Key=self._key(name))
        return num_bytes

    def _get(self, name: str, num_bytes: int) -> bytes | None:
        with _absent_is_none():
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
            return _read(answer, num_bytes)
        return None

    def _get_head(self, name: str, num_bytes: int) -> bytes | None:
        with _absent_is_none():
            try:
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=self._key(name), Range=f"bytes=0-{num_bytes - 1}"
                )
            except ClientError as fault:
                if _code(fault) in _EMPTY:
                    return b""
                raise
            return _read(answer, num_bytes)  # a server may send the whole object
        return None

    def _put_if_absent(self, key: str, body: bytes) -> bool:
        target = {"Bucket": self._bucket, "Key": key, "Body": body}
        try:
            self._client.put_object(**target, IfNoneMatch="*")
        except ClientError as fault:
            if _code(fault) in _LOST_RACE:
                return False
            if _code(fault) not in _NO_CONDITIONS:
                raise
            self._client.put_object(**target)
        return True

    def _reserve(self, num_bytes: int) -> bool:
        if self._counted_at is None or time.monotonic() - self._counted_at > RECOUNT_SECONDS:
            stats = self._count()
            with self._lock:
                self._counted_bytes, self._counted_at = stats.num_bytes or 0, time.monotonic()
        with self._lock:
            if self._counted_bytes + num_bytes > self.max_bytes:
                return False
            self._counted_bytes += num_bytes
            return True

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self._counted_bytes = max(0, self._counted_bytes + num_bytes)

    def _count(self) -> TierStats:
        deadline = time.monotonic() + COUNT_SECONDS
        num_blocks = num_bytes = num_foreign = 0
        for page in self._pages():
            for name, size in page:
                num_bytes += size
                num_blocks += is_block_name(name)
                num_foreign += not is_name(name)
            if time.monotonic() > deadline:
                raise TierError(
                    f"the cache's bucket: its objects cannot be counted in {COUNT_SECONDS:g} s"
                )
        return TierStats(num_blocks, num_bytes, self.max_bytes, num_foreign=num_foreign)

    def _pages(self) -> Iterator[list[tuple[str, int]]]:
        """Names without the prefix, and sizes, of all objects: one request for each thousand."""
        listing = self._client.get_paginator("list_objects_v2")
        pages = iter(listing.paginate(Bucket=self._bucket, Prefix=self._prefix))

        def ask() -> list[tuple[str, int]] | None:
            page = next(pages, None)
            if page is None:
                return None
            found = page.get("Contents", ())
            return [(item["Key"].removeprefix(self._prefix), int(item["Size"])) for item in found]

        while (page := self._request(ask)) is not None:
            yield page


def _read(answer: dict[str, Any], num_bytes: int) -> bytes:
    """The first bytes of an object; all of them if it is shorter.

    A body that ends too early is a fault of the network, so it raises OSError. As a damaged block
    it would be deleted.
    """
    with answer["Body"] as body:
        content: bytes = body.read(num_bytes)
    if len(content) < min(num_bytes, answer.get("ContentLength", 0)):
        raise OSError(f"an answer was cut after {len(content)} bytes")
    return content


def _code(fault: ClientError) -> str:
    return str(fault.response.get("Error", {}).get("Code", ""))


@contextmanager
def _absent_is_none() -> Iterator[None]:
    """Inside the block, the error of a missing object ends the block and is not raised."""
    try:
        yield
    except ClientError as fault:
        if _code(fault) not in _ABSENT:
            raise


@contextmanager
def _s3_errors() -> Iterator[None]:
    try:
        yield
    except ClientError as fault:
        kind: Any = TierMisconfigured if _code(fault) in _REFUSED else TierError
        raise kind(f"the cache's bucket: {fault}") from fault
    except (BotoCoreError, HTTPClientError, OSError, TierError) as fault:
        raise TierError(f"the cache's bucket: {fault}") from fault
    except Exception as fault:  # boto3 raises anything for an answer that is not S3's
        problem = f"its answer cannot be read ({type(fault).__name__}: {fault})"
        raise TierError(f"the cache's bucket: {problem[:300]}") from fault
