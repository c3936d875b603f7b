"""Names and tiers for tests."""

from __future__ import annotations

from batchkv_cache_store.tiers.base import Tier

MIB = 1024 * 1024
S3_SETTINGS = {
    "region_name": "us-east-1",
    "aws_access_key_id": "test",
    "aws_secret_access_key": "test",
}


def name(number: int, kind: str = "kv") -> str:
    """The name of one of many blocks, spread over the fan-out."""
    return f"{number * 37 % 256:02x}{number:062x}.{kind}"


def objects_tier(url: str, prefix: str, max_bytes: int = 16 * MIB, bucket: str = "blocks") -> Tier:
    """A tier in the test's bucket; the module needs the optional boto3."""
    from batchkv_cache_store.tiers.objects import ObjectsTier

    return ObjectsTier(bucket, max_bytes, endpoint_url=url, prefix=prefix, **S3_SETTINGS)
