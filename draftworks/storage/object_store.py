"""Objects below a URL of S3-compatible storage, through obstore, which is imported when a store is opened. Torch-free.

An object is complete or absent. `create` never replaces one, and `swap` replaces the one that the caller has seen.

Results are copied there for users who do not mount `var`:

    {url}/{asset}/{target}/{identity}-{content}/...              the files of a result, never changed
    {url}/{asset}/{target}/{identity}-{content}/artifact.json    its record with their digests, created last
    {url}/{asset}/{target}/current.json                          names the newest folder; swapped by condition

A folder without a record is not complete: an upload was interrupted, and the next run goes on with it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from draftworks.errors import ConfigError, StoreError
from draftworks.storage.artifacts import POINTER, RECORD, SCHEMA_VERSION, Artifact
from draftworks.storage.files import parse_json, publish_file
from draftworks.storage.identity import digest
from draftworks.storage.object_access import (
    MissingObjectError,
    ObjectAccess,
    ObjectStorageError,
    explain,
    find_code,
    may_pass,
    parse_object_url,
    read_settings,
)

SINGLE_PUT_BYTES = 64 << 20
"""Larger files are uploaded in parts."""
SAY_AFTER_S = 5.0
MAX_PAUSE_S = 5.0
INSTALL = "pip install -e '.[s3]'"
_Result = TypeVar("_Result")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredObject:
    """An object that was read, and the version that `swap` has to be told to replace it."""

    content: bytes
    version: str


@dataclass(frozen=True)
class ObjectInfo:
    """An entry of a listing. `modified` is in seconds since 1970, by the server's clock."""

    path: str
    nbytes: int
    version: str
    modified: float


@dataclass(frozen=True)
class ByteRange:
    """Bytes of an object, from `start` to before `end`."""

    start: int
    end: int


class ObjectStore:
    """The objects below `url`, named by their paths there. Thread-safe; no call lists objects but `list`.

    A call that meets a server which does not answer, or answers with an error of its own, is made again for `retry_s`.

    Args:
        store: a store of obstore.
        url: its name in messages, to which nothing secret belongs.
        prefix: of all paths.
    """

    def __init__(self, store: Any, url: str, prefix: str = "", retry_s: float = 60.0) -> None:
        self._store = store
        self.url = url.rstrip("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._retry_s = retry_s

    @classmethod
    def open(cls, url: str, access: ObjectAccess) -> ObjectStore:
        """Open a place in object storage; nothing is sent to the server yet.

        Raises:
            ConfigError: obstore is not installed, the URL is none, or the environment lacks the keys.
        """
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise ConfigError(f"{url}: object storage needs obstore, which is not installed: {INSTALL}") from error
        try:
            place = parse_object_url(url)
        except ValueError as error:
            raise ConfigError(f"{url.split('?')[0].split('@')[-1]}: {error}") from error
        store = S3Store(
            place.bucket,
            client_options={
                "timeout": timedelta(seconds=access.timeout_s),
                "connect_timeout": timedelta(seconds=min(10.0, access.timeout_s)),
                "allow_http": True,
            },
            # What is worth more than these tries is up to `_call`, which says that it waits.
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=access.timeout_s)},
            **read_settings(place.url, access),
        )
        return cls(store, place.url, place.prefix, access.retry_s)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url})"

    def inside(self, folder: str) -> ObjectStore:
        """Return the same storage, narrowed to the paths below `folder`."""
        return ObjectStore(self._store, f"{self.url}/{folder}", f"{self._prefix}{folder}", self._retry_s)

    def locate(self, path: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{path}"

    def create(self, path: str, content: bytes | bytearray | memoryview) -> bool:
        """Create an object; return False, and change nothing, if there is one of that name.

        After a lost answer that one may be of this very call: give contents that can be told apart.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def put() -> bool:
            try:
                obstore.put(self._store, self._prefix + path, content, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return self._call("write", path, put)

    def swap(self, path: str, content: bytes, seen: str | None) -> bool:
        """Replace the object of the version `seen` (None: there was none); return False if it is another one by now."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError
        from obstore.store import LocalStore

        if seen is None:
            return self.create(path, content)
        if isinstance(self._store, LocalStore):  # for tests: a folder knows no conditional update
            found = self.find(path)
            mode: Any = "overwrite"
            if found is None or found.version != seen:
                return False
        else:
            mode = {"e_tag": seen}

        def put() -> bool:
            try:
                obstore.put(self._store, self._prefix + path, content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, FileNotFoundError, PreconditionError) as error:
                if find_code(error) == "NoSuchBucket":
                    raise
                return False
            return True

        return self._call("write", path, put)

    def read(self, path: str) -> StoredObject:
        """Return a whole object. Raises MissingObjectError if there is none."""
        import obstore

        def get() -> StoredObject:
            found = obstore.get(self._store, self._prefix + path)
            return StoredObject(bytes(found.bytes()), found.meta["e_tag"] or "")

        return self._call("read", path, get)

    def find(self, path: str) -> StoredObject | None:
        """Return an object as `read` does, or None if there is none."""
        try:
            return self.read(path)
        except MissingObjectError:
            return None

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[Any]:
        """Return the bytes of each range, as buffers; near ones are asked for at once.

        Raises:
            MissingObjectError: there is no such object.
            ObjectStorageError: it ends before a range does.
        """
        import obstore

        starts, ends = [each.start for each in ranges], [each.end for each in ranges]
        found = self._call(
            "read", path, lambda: obstore.get_ranges(self._store, self._prefix + path, starts=starts, ends=ends)
        )
        for part, wanted in zip(found, ranges, strict=True):
            if len(part) != wanted.end - wanted.start:  # a server gives what there is, without an error
                raise ObjectStorageError(
                    f"{self.locate(path)} is truncated: expected bytes {wanted.start:,} to {wanted.end:,}, found only "
                    f"{len(part):,} of them"
                )
        return list(found)

    def inspect(self, path: str) -> ObjectInfo | None:
        """Return size and version of an object without reading it; None if there is none."""
        import obstore

        try:
            return _describe(self._call("read", path, lambda: obstore.head(self._store, self._prefix + path)), "")
        except MissingObjectError:
            return None

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a folder, in the order of their names. A request for each thousand."""
        import obstore

        below = (self._prefix + folder).rstrip("/")
        listing = self._call("list", folder, lambda: obstore.list(self._store, below or None, chunk_size=1000))
        while chunk := self._call("list", folder, lambda: next(listing, None)):
            for found in chunk:
                yield _describe(found, self._prefix)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects; a missing object is no error."""
        import obstore

        for path in paths:

            def delete(name: str = self._prefix + path) -> None:
                try:
                    obstore.delete(self._store, name)
                except FileNotFoundError as error:
                    if find_code(error) == "NoSuchBucket":
                        raise

            self._call("remove", path, delete)

    def upload(self, path: str, file: Path) -> None:
        """Write a file's bytes as an object. One of the same name is left if it has the same length.

        So a path has to be given to one content only, as one with a digest in it is.
        """
        import obstore

        size, known = file.stat().st_size, self.inspect(path)
        if known is not None and known.nbytes == size:
            return
        in_parts = size > SINGLE_PUT_BYTES

        def put() -> None:
            with file.open("rb") as stream:
                obstore.put(self._store, self._prefix + path, stream, use_multipart=in_parts)

        self._call("write", path, put)

    def download(self, path: str, file: Path) -> None:
        """Write an object's bytes to a file, which is complete or absent.

        Raises:
            MissingObjectError: there is no such object.
        """
        import obstore

        def get() -> None:
            with publish_file(file) as staging, staging.open("wb") as stream:
                found = obstore.get(self._store, self._prefix + path)
                for chunk in found.stream(min_chunk_size=8 << 20):
                    stream.write(chunk)
                if stream.tell() != found.meta["size"]:
                    raise ObjectStorageError(
                        f"{self.locate(path)} broke off: expected {found.meta['size']:,} bytes, found {stream.tell():,}"
                    )

        self._call("read", path, get)

    def require_writable(self) -> None:
        """Raise unless objects can be created, only once each, read by ranges and removed.

        Raises:
            ConfigError: the server ignores conditions, so that writers would overwrite each other.
            ObjectStorageError: the server cannot be reached, or refuses.
        """
        path, content = f"check/{uuid4().hex}", b"Draftworks: whether this can be written to"
        self.create(path, content)
        try:
            if self.create(path, content[::-1]):
                raise ConfigError(
                    f"{self.url}: this server ignores conditions (If-None-Match) on writes, and two writers would "
                    "overwrite each other's objects. Use one that keeps them"
                )
            if bytes(self.read_ranges(path, [ByteRange(0, 10)])[0]) != content[:10]:
                raise ConfigError(f"{self.url}: this server does not return the bytes of a range that was asked for")
        finally:
            self.remove([path])

    def _call(self, verb: str, path: str, work: Callable[[], _Result]) -> _Result:
        """Return `work()`, repeated after passing failures; other errors are raised in words for a person."""
        from obstore.exceptions import BaseError

        started, pause, said = time.monotonic(), 0.1, False
        while True:
            try:
                return work()
            except (BaseError, FileNotFoundError, PermissionError, TimeoutError) as error:
                waited = time.monotonic() - started
                if not may_pass(error) or waited + pause > self._retry_s:
                    raise explain(
                        error, verb, self.url, self.locate(path) if path else self.url, waited
                    ) from None  # obstore's own text is pages long
                if not said and waited > SAY_AFTER_S:
                    log.warning("%s does not answer: trying again for %.0f s", self.url, self._retry_s)
                    said = True
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)


def _describe(found: Any, prefix: str) -> ObjectInfo:
    return ObjectInfo(
        found["path"].removeprefix(prefix), found["size"], found["e_tag"] or "", found["last_modified"].timestamp()
    )


CONTENT_LENGTH = 12
SWAP_TRIES = 20


@dataclass(frozen=True)
class PublishedResult:
    """A result in object storage. `files` were uploaded now; 0 if it was there already."""

    url: str
    files: int


@dataclass(frozen=True)
class Publication:
    """The place in object storage that results are copied to."""

    objects: ObjectStore

    def require_writable(self) -> None:
        """Raise if nothing can be published, see `ObjectStore.require_writable`."""
        self.objects.require_writable()

    def publish(self, artifact: Artifact) -> PublishedResult:
        """Copy a result and let the pointer name it. Objects that exist are not copied again.

        Raises:
            ObjectStorageError: the storage cannot be reached, or refuses. The next call goes on.
            StoreError: the result is not whole.
        """
        problem = artifact.find_damage()
        if problem is not None:
            raise StoreError(f"{problem}. Materialize {artifact.asset} of target {artifact.target} again")
        results = self.objects.inside(f"{artifact.asset}/{artifact.target}")
        folder = f"{artifact.path.name}-{digest(artifact.files)[:CONTENT_LENGTH]}"
        uploaded = self._upload(artifact, results.inside(folder))
        self._point_to(results, folder, artifact)
        return PublishedResult(results.locate(folder), uploaded)

    def _upload(self, artifact: Artifact, place: ObjectStore) -> int:
        if place.inspect(RECORD) is not None:
            return 0
        for name in sorted(artifact.files):
            place.upload(name, artifact.path / name)
        # Of two processes that publish equal files, either one's record will do.
        place.create(RECORD, (artifact.path / RECORD).read_bytes())
        return len(artifact.files)

    def _point_to(self, results: ObjectStore, folder: str, artifact: Artifact) -> None:
        value = {
            "schema": SCHEMA_VERSION,
            "folder": folder,
            "identity": artifact.path.name,
            "data_version": artifact.data_version,
        }
        for _ in range(SWAP_TRIES):
            found = results.find(POINTER)
            if found is not None and _read_folder(found.content) == folder:
                return
            content = (json.dumps(value, indent=2) + "\n").encode()
            if results.swap(POINTER, content, None if found is None else found.version):
                return
            log.info("%s: another process has just changed it: looking again", results.locate(POINTER))
        raise StoreError(
            f"{results.locate(POINTER)}: other processes keep changing it. Publish {artifact.asset} of target "
            f"{artifact.target} from one deployment only"
        )


def _read_folder(content: bytes) -> str | None:
    """Return the folder that a pointer names; None if it is no pointer, and may be replaced."""
    try:
        return parse_json(content)["folder"]
    except (ValueError, KeyError, TypeError):
        return None
