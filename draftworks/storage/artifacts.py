"""Store of results: `root/{asset}/{target}/{digest}/`, complete or absent, and `current.json` naming the newest digest.

A result is built in `{digest}.partial/`, which survives a crash so that the next attempt can continue in it, and is
published by one rename. The digest is that of the *identity* (the inputs); the data version is that of the output.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.storage.file_lock import hold_lock, try_lock
from draftworks.storage.files import publish_json, read_json, replace_folder, require_file
from draftworks.storage.identity import FileDigests, digest, file_digest
from draftworks.storage.lease import Lease
from draftworks.storage.names import require_name


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of a file when it was written; `bytes` is None if the size was not recorded."""

    bytes: int | None
    digest: str


@dataclass(frozen=True)
class FileManifest:
    """Records of files, by path relative to their folder, and the function that computed their digests."""

    files: Mapping[str, FileRecord]
    digest_of: Callable[[Path], str] = file_digest

    @classmethod
    def record(cls, folder: Path, names: Iterable[str], digest_of: Callable[[Path], str] = file_digest) -> FileManifest:
        """Record the files as they are now. Raises OSError for one that is not a regular file."""
        paths = {name: folder / name for name in names}
        return cls({name: FileRecord(path.stat().st_size, digest_of(path)) for name, path in paths.items()}, digest_of)

    @classmethod
    def of_digests(cls, digests: Mapping[str, str], digest_of: Callable[[Path], str] = file_digest) -> FileManifest:
        """A manifest that was stored as digests by name, without sizes."""
        return cls({name: FileRecord(None, digest) for name, digest in digests.items()}, digest_of)

    @property
    def digests(self) -> dict[str, str]:
        return {name: file.digest for name, file in self.files.items()}

    def find_damage(self, folder: Path, names: Iterable[str] | None = None, read: bool = True) -> str | None:
        """Return a description of the first file that differs from its record; None if there is none.

        Args:
            names: the files to compare; default all.
            read: compare digests too, not only sizes.
        """
        looked_at = self.files if names is None else names
        return next(
            filter(None, (self._find_file_damage(folder / name, self.files[name], read) for name in looked_at)), None
        )

    def require_intact(self, folder: Path, advice: str, names: Iterable[str] | None = None) -> None:
        """Raise StoreError, ending with `advice`, if a file (of `names`, or of all) differs from its record."""
        damage = self.find_damage(folder, names)
        if damage is not None:
            raise StoreError(f"{damage}. {advice}")

    def _find_file_damage(self, path: Path, file: FileRecord, read: bool) -> str | None:
        try:
            size = require_file(path).stat().st_size
            if file.bytes not in (None, size):
                return f"{path}: truncated or altered: expected {file.bytes} bytes, found {size} bytes"
            if read and (digest := self.digest_of(path)) != file.digest:
                return f"{path}: altered: expected digest {file.digest}, found {digest} ({size} bytes)"
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            return f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        return None


def list_files(folder: Path) -> list[str]:
    """Return the relative POSIX paths of all files in a folder and its subfolders, sorted by path components."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


SCHEMA_VERSION = 1
RECORD = "artifact.json"
POINTER = "current.json"
LOCK = ".lock"
PARTIAL, REPLACED = ".partial", ".old"
UNPUBLISHED = (PARTIAL, REPLACED)
"""Suffixes of folders that are not results: one being built, and one that was replaced and is about to be removed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildResult:
    """Summary and identity that a build function returns with its result.

    Attributes:
        data_version: digest of the content.
        summary: figures to keep in the record.
        own_digests: subfolders whose files carry their own digests; the manifest leaves them out, so that a hit does not
            read them again.
        identity_changes: fields of the identity that were provisional, with their values now: the result is published
            under the identity with these.
    """

    data_version: str
    summary: dict[str, Any] = field(default_factory=dict)
    own_digests: tuple[str, ...] = ()
    identity_changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A published result."""

    asset: str
    target: str
    path: Path
    identity: dict[str, Any]
    data_version: str
    summary: dict[str, Any]
    files: dict[str, str]
    """Digest of every file, by path inside the folder."""
    created: float
    seconds: float
    hit: bool = False
    """Whether the result existed already and nothing was built."""

    def find_damage(self, digest_of: Callable[[Path], str] = file_digest) -> str | None:
        """Return a description of the first file that differs from the record; None if all match."""
        return FileManifest.of_digests(self.files, digest_of).find_damage(self.path)


Check = Callable[[Artifact], bool]


@dataclass(frozen=True)
class Claim:
    """The right to build one result.

    Attributes:
        folder: to build in; files of an interrupted attempt are still present.
        publish: publishes what is in the folder atomically.
    """

    folder: Path
    publish: Callable[[BuildResult], Artifact]


@dataclass(frozen=True)
class ArtifactStore:
    """All results in one root folder.

    Attributes:
        digests: of files of results that were read before and are as they were.
    """

    root: Path
    digests: FileDigests = field(default_factory=FileDigests, compare=False)

    def obtain(
        self,
        asset: str,
        target: str,
        identity: dict[str, Any],
        build: Callable[[Path], BuildResult],
        start_over: bool = False,
        rebuild: bool = False,
        still_good: Check | None = None,
        lock: Path | None = None,
    ) -> Artifact:
        """Return the result of this identity: an intact existing one, or one built now and published atomically.

        Waits while another process builds the same asset of the same target, and then uses its result.

        Args:
            build: fills the folder it is given, in which the files of an interrupted attempt are still present.
            start_over: discard the files of an interrupted attempt, and build even if the result exists.
            rebuild: build even if the result exists, continuing from the files of an interrupted attempt.
            still_good: called with an existing result that refers to something outside its folder; False means that the
                result is built again.
            lock: a lock file that is held too while the result is built, and is waited for first.
        """
        folder = self._locate(asset, target)
        final = folder / digest(identity)
        artifact = None if start_over or rebuild else self._find_intact(final, still_good)
        if artifact is None:
            with ExitStack() as held:
                leases: list[Lease] = []
                if lock is not None:
                    lock.parent.mkdir(parents=True, exist_ok=True)
                    leases.append(held.enter_context(hold_lock(lock, _describe_busy(asset, target, lock))))
                leases.append(held.enter_context(self._lock(folder, asset, target)))
                if any(lease.waited for lease in leases) and not (start_over or rebuild):
                    artifact = self._find_intact(final, still_good)
                if artifact is None:
                    artifact = self._build(final, asset, target, identity, build, start_over, leases)
        publish_json(folder / POINTER, {"schema": SCHEMA_VERSION, "digest": artifact.path.name})
        return artifact

    @contextmanager
    def claim(self, asset: str, target: str, identity: dict[str, Any]) -> Iterator[Claim | None]:
        """Context with the right to build a result beside another one; nobody else builds the asset meanwhile.

        Yields None if the result exists, or if another process builds this asset of this target. What is published
        becomes the newest result when `obtain` finds it.
        """
        folder = self._locate(asset, target)
        final = folder / digest(identity)
        folder.mkdir(parents=True, exist_ok=True)
        with try_lock(folder / LOCK) as lease:
            if lease is None or self._find_intact(final, None) is not None:
                yield None
                return
            partial, started = self._open_partial(final, start_over=False), time.time()
            yield Claim(partial, lambda built: self._publish(final, asset, target, identity, built, started, [lease]))

    def locate_partial(self, asset: str, target: str, identity: dict[str, Any]) -> Path:
        """Return the folder in which a result of this identity is built; it need not exist."""
        final = self._locate(asset, target) / digest(identity)
        return final.with_name(final.name + PARTIAL)

    def is_current(self, asset: str, target: str, identity: dict[str, Any], still_good: Check | None = None) -> bool:
        """Whether the newest result is of this identity and whole, so that `obtain` would change nothing."""
        newest, wanted = self.find(asset, target), self._locate(asset, target) / digest(identity)
        return newest is not None and newest.path == wanted and self._find_intact(wanted, still_good) is not None

    def load_current(self, asset: str, target: str) -> Artifact:
        """Return the newest result of an asset for a target.

        Raises:
            StoreError: there is none, or its record is damaged.
        """
        found = self.find(asset, target)
        if found is None:
            pointer = self._locate(asset, target) / POINTER
            raise StoreError(f"{asset} of target {target} does not exist yet: materialize it first ({pointer})")
        return found

    def find(self, asset: str, target: str) -> Artifact | None:
        """Return the newest result as `load_current` does; None if there is none."""
        folder = self._locate(asset, target)
        try:
            name = require_name(read_json(folder / POINTER)["digest"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{folder / POINTER}: not a pointer to a result: {error}. Materialize {asset} again"
            ) from error
        return self._read(folder / name)

    def list_all(self, asset: str, target: str) -> list[Artifact]:
        """Return every result of an asset for a target, newest first, without those whose record cannot be read."""
        found = []
        for folder in sorted(self._locate(asset, target).glob("*/")):
            if folder.suffix in UNPUBLISHED or folder.name == LOCK:
                continue
            try:
                found.append(self._read(folder))
            except StoreError as error:
                log.warning("%s", error)
        return sorted(found, key=lambda artifact: -artifact.created)

    def _locate(self, asset: str, target: str) -> Path:
        return Path(self.root, require_name(asset), require_name(target))

    def _find_intact(self, final: Path, still_good: Check | None) -> Artifact | None:
        """Return the result in `final` if it is intact; otherwise log why it has to be built again and return None."""
        if not final.exists():
            return None
        try:
            artifact = replace(self._read(final), hit=True)
            problem = artifact.find_damage(self.digests.of_file)
        except StoreError as error:
            artifact, problem = None, str(error)
        if artifact is None or problem is not None:
            log.warning("%s: building it again", problem)
            return None
        return artifact if still_good is None or still_good(artifact) else None

    @contextmanager
    def _lock(self, folder: Path, asset: str, target: str) -> Iterator[Lease]:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / LOCK, _describe_busy(asset, target, folder / LOCK)) as lease:
            yield lease

    def _build(
        self,
        final: Path,
        asset: str,
        target: str,
        identity: dict[str, Any],
        build: Callable[[Path], BuildResult],
        start_over: bool,
        leases: Sequence[Lease],
    ) -> Artifact:
        partial, started = self._open_partial(final, start_over), time.time()
        return self._publish(final, asset, target, identity, build(partial), started, leases)

    def _open_partial(self, final: Path, start_over: bool) -> Path:
        partial = final.with_name(final.name + PARTIAL)
        if start_over:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        return partial

    def _publish(
        self,
        final: Path,
        asset: str,
        target: str,
        identity: dict[str, Any],
        built: BuildResult,
        started: float,
        leases: Sequence[Lease],
    ) -> Artifact:
        partial = final.with_name(final.name + PARTIAL)
        identity = {**identity, **built.identity_changes}
        final = final.with_name(digest(identity))
        kept = {name: value for name, value in asdict(built).items() if name != "identity_changes"}
        record = {
            "schema": SCHEMA_VERSION,
            "asset": asset,
            "target": target,
            "identity": identity,
            "files": _record_files(partial, built.own_digests),
            "created": time.time(),
            "seconds": round(time.time() - started, 3),
            **kept,
        }

        def confirm() -> None:
            for lease in leases:
                lease.confirm()

        publish_json(partial / RECORD, record)
        replace_folder(partial, final, final.with_name(final.name + REPLACED), confirm)
        made = self._read(final)
        made.find_damage(self.digests.of_file)  # remembers the digests: who finds it made need not read it
        return made

    def _read(self, folder: Path) -> Artifact:
        try:
            record = read_json(folder / RECORD)
            if record["schema"] != SCHEMA_VERSION:
                raise StoreError(f"{folder / RECORD}: schema {record['schema']}, expected {SCHEMA_VERSION}")
            names = ("asset", "target", "identity", "data_version", "summary", "files", "created", "seconds")
            return Artifact(path=folder, **{name: record[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{folder}: not a complete result ({error}). Materialize it again") from error


@dataclass(frozen=True)
class ReadOnceStore(ArtifactStore):
    """A store that reads each record once, for many comparisons at one moment."""

    _pointed: dict[tuple[str, str], Artifact | None] = field(default_factory=dict, compare=False)
    _records: dict[Path, Artifact] = field(default_factory=dict, compare=False)

    def find(self, asset: str, target: str) -> Artifact | None:
        key = asset, target
        if key not in self._pointed:
            self._pointed[key] = super().find(asset, target)
        return self._pointed[key]

    def _read(self, folder: Path) -> Artifact:
        if folder not in self._records:
            self._records[folder] = super()._read(folder)
        return self._records[folder]


def _describe_busy(asset: str, target: str, lock: Path) -> str:
    return (
        f"{asset} of target {target} is being materialized by another run (lock {lock}): waiting for it. "
        "Cancel one of the two if this is not wanted; the lock goes with its process"
    )


def _record_files(folder: Path, own_digests: tuple[str, ...]) -> dict[str, str]:
    """Return the digests of the built files; staging files of writers that were killed are removed first."""
    for leftover in folder.rglob("*.tmp"):
        leftover.unlink()
    counted = (name for name in list_files(folder) if name != RECORD and Path(name).parts[0] not in own_digests)
    return FileManifest.record(folder, counted).digests
