"""Addresses in object storage, the settings to reach them, and their errors in words."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Protocol

from draftworks.errors import ConfigError, StoreError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


class ObjectAccess(Protocol):
    """How a bucket is reached, as `draftworks.config.features.BucketAccess` describes it."""

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


_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"\b(?:status|error)\D{0,24}\b(4\d\d)\b", re.IGNORECASE)
_WORTH_ANOTHER_TRY = {"408", "409", "425", "429"}
_WRONG_KEYS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "AuthorizationHeaderMalformed",
}


class ObjectStorageError(StoreError):
    """Object storage cannot be reached, refuses, or has lost an object."""


class MissingObjectError(ObjectStorageError):
    """There is no such object."""


def explain(error: Exception, verb: str, url: str, where: str, waited: float) -> ObjectStorageError:
    """Return an error of obstore in words for a person.

    Args:
        verb: what could not be done.
        url: of the storage, and `where` that of the object.
        waited: seconds that it was tried for.
    """
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    code = find_code(error)
    if code == "InvalidRange":
        return ObjectStorageError(f"{where} is truncated: it ends before the bytes that were asked for")
    if code == "NoSuchBucket":
        return ObjectStorageError(f"{url}: there is no such bucket. Create it, or correct the URL")
    if isinstance(error, FileNotFoundError):
        return MissingObjectError(f"{where}: there is no such object")
    if code in _WRONG_KEYS:
        return ObjectStorageError(f"{where}: the server does not accept these keys ({code}). Correct them")
    if code == "RequestTimeTooSkewed":
        return ObjectStorageError(f"{where}: the clocks of this machine and of the server differ too much. Set them")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
        return ObjectStorageError(
            f"{where}: these keys may not {verb} here ({code or 'refused'}). Give them the right to, or correct them"
        )
    told = _shorten(error)
    if may_pass(error):
        return ObjectStorageError(
            f"{where}: the server could not be reached, or failed, for {waited:.0f} s: {told}. Check that it runs, "
            "and object_storage.endpoint in registry/deployment.yaml"
        )
    return ObjectStorageError(f"{where}: cannot {verb}: {told}")


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    from obstore.exceptions import GenericError, JoinError

    if isinstance(error, TimeoutError):
        return True
    if not isinstance(error, (GenericError, JoinError)):
        return False
    status = _STATUS.search(str(error))
    return status is None or status.group(1) in _WORTH_ANOTHER_TRY


def find_code(error: Exception) -> str:
    """Return S3's own name of an error, such as NoSuchBucket; empty if it said none."""
    found = _CODE.search(str(error))
    return found.group(1) if found else ""


def _shorten(error: Exception) -> str:
    """Return the first line of obstore's text, which names neither keys nor signatures."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first if len(first) <= 300 else first[:300] + "…"
