"""What goes wrong with object storage, in words for a person, and what of it may pass. Standard library only."""

from __future__ import annotations

import re

from draftworks.errors import StoreError

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
