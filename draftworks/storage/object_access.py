"""Places in object storage, and how they are reached. Standard library only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Protocol

from draftworks.errors import ConfigError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


class ObjectAccess(Protocol):
    """How a bucket is reached, as `draftworks.config.object_storage.BucketAccess` describes it."""

    @property
    def endpoint(self) -> str | None: ...
    @property
    def region(self) -> str | None: ...
    @property
    def access_key_env(self) -> str: ...
    @property
    def secret_key_env(self) -> str: ...
    @property
    def session_token_env(self) -> str: ...
    @property
    def anonymous(self) -> bool: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def retry_s(self) -> float: ...


@dataclass(frozen=True)
class ObjectUrl:
    """A place in object storage: `s3://bucket/prefix`. The prefix has no slash at its ends and may be empty."""

    bucket: str
    prefix: str = ""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse_object_url(value: str) -> ObjectUrl:
    """Return the bucket and prefix of a URL `s3://bucket/prefix`.

    Raises:
        ValueError: it is none, or has keys in it, which would appear in logs. The message does not repeat the URL.
    """
    scheme, _, rest = value.partition("://")
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or "?" in value:
        raise ValueError("a URL of object storage must not contain keys or options: they are set in object_storage")
    if scheme != "s3" or not _BUCKET.fullmatch(bucket):
        raise ValueError("expected a place in object storage such as s3://bucket/prefix")
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts) or not prefix.isprintable():
        raise ValueError("expected a prefix of names between slashes, such as s3://bucket/team/features")
    return ObjectUrl(bucket, prefix)


def read_settings(url: str, access: ObjectAccess) -> dict[str, Any]:
    """Return obstore's settings of place and keys.

    Raises:
        ConfigError: the environment has only one of two keys, or none for a server that is not Amazon's.
    """
    found: dict[str, Any] = {"endpoint": access.endpoint, "region": access.region}
    if access.endpoint is not None and access.region is None:
        found["region"] = os.environ.get("AWS_REGION") or "us-east-1"
    found = {name: value for name, value in found.items() if value is not None}
    if access.anonymous:
        return {**found, "skip_signature": True}
    names = {"access_key_id": access.access_key_env, "secret_access_key": access.secret_key_env}
    keys = {setting: os.environ[name] for setting, name in names.items() if os.environ.get(name)}
    missing = [name for setting, name in names.items() if setting not in keys]
    if missing and (keys or access.endpoint is not None):
        raise ConfigError(
            f"{url}: the environment has no {' and no '.join(missing)}: set it, or name another one in "
            "object_storage (or anonymous: true)"
        )
    token = os.environ.get(access.session_token_env)
    return {**found, **keys, **({"session_token": token} if keys and token else {})}
