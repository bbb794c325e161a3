"""Features of an evaluation, made once per `EvalConfig` and kept: `{cache_dir}/eval_cache/{key}/`. No torch.

Key, staging by rename and the names follow `EvalCache` of SpecForge (pull request 639). Beyond it, an entry records
content digests of what it was made from and of its own files, so one that no longer fits is made again, saying why.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from draftworks.config.validation import describe_validation_error
from draftworks.errors import StoreError
from draftworks.evaluation.cache.eval_config import EvalConfig
from draftworks.storage.atomic import (
    ASIDE,
    STAGED,
    FolderMissing,
    make_sibling_path,
    move_aside,
    read_undisturbed,
    remove,
    replace_folder,
    sweep,
)
from draftworks.storage.changes import describe_changes
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.identity import digest
from draftworks.storage.manifest import FileManifest, FileRecord, list_files
from draftworks.storage.regular_files import MAX_JSON_BYTES, read_bytes

SCHEMA_VERSION = 1
META = "eval_cache_meta.json"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Errors of a rename to a path that somebody else has taken."""


class EntryMeta(BaseModel):
    """The content of eval_cache_meta.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    key: str
    identity: tuple[str, ...]
    inputs: dict[str, str]
    files: dict[str, FileRecord]


def write_meta(folder: Path, config: EvalConfig, inputs: Mapping[str, str]) -> None:
    """Record the files in `folder`, and what they were made from."""
    files = dict(FileManifest.record(folder, list_files(folder)).files)
    meta = EntryMeta(key=config.cache_key, identity=config.identity_fields(), inputs=dict(inputs), files=files)
    (folder / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")


def find_entry_problem(folder: Path, config: EvalConfig, inputs: Mapping[str, str] | None, verify: bool) -> str | None:
    """Why a folder is not a config's entry.

    Args:
        inputs: what it has to be made from; None for whatever.
        verify: compare digests, not only sizes.
    """
    path = folder / META
    try:
        meta = EntryMeta.model_validate_json(read_bytes(path, MAX_JSON_BYTES))
    except ValidationError as error:
        return describe_validation_error(error, EntryMeta, str(path))
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    if (meta.key, meta.identity) != (config.cache_key, config.identity_fields()):
        return f"{path} is of another evaluation: expected {config.identity_fields()}, found {meta.identity}"
    damage = FileManifest(meta.files).find_damage(folder, read=verify)
    if damage is not None or inputs is None:
        return damage
    return "; ".join(describe_changes(inputs, meta.inputs, "{name} changed from {found} to {expected}")) or None


T = TypeVar("T")
Producer = Callable[[Path], object]
"""Fills the empty folder it is given."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """A published entry.

    Attributes:
        hit: it was there already, or another process published it while this one waited.
        data_version: digest of key and inputs.
        rebuilt_because: what was wrong with the entry that this one replaced; None where it replaced none.
    """

    path: Path
    key: str
    hit: bool
    data_version: str
    rebuilt_because: str | None = None


@dataclass(frozen=True)
class EvalCache:
    """Entries are complete or absent at any moment, for any number of processes, killed at any point.

    It knows nothing of ranks: the caller produces on one and lets the others wait.
    """

    cache_dir: Path

    @classmethod
    def for_config(cls, config: EvalConfig) -> EvalCache:
        """The cache a config asks for.

        Raises:
            ValueError: its `cache_dir` is not set.
        """
        if not config.cache_dir:
            raise ValueError("EvalConfig.cache_dir is not set: expected the folder of the evaluation cache")
        return cls(Path(config.cache_dir))

    @staticmethod
    def key(config: EvalConfig) -> str:
        return config.cache_key

    @property
    def root(self) -> Path:
        return self.cache_dir / "eval_cache"

    def dir_for(self, config: EvalConfig) -> Path:
        """Where the entry of a config is, if there is one."""
        return self.root / config.cache_key

    def try_get(
        self, config: EvalConfig, inputs: Mapping[str, str] | None = None, *, verify: bool = False
    ) -> Path | None:
        """The folder of a config's entry if its files are there in their sizes.

        The entry may be replaced while its path is in use; `read` is safe from that.

        Args:
            inputs: what it has to be made from; None for whatever.
            verify: also compare digests, and raise where an entry is there but not what is asked for.

        Raises:
            StoreError: `verify` is set, and a file is missing, truncated or altered, or the inputs are others.
        """
        finding = self._examine(config, inputs, verify)
        if verify and finding.problem is not None:
            raise _not_whole(finding.problem)
        return self.dir_for(config) if finding.usable else None

    def read(self, config: EvalConfig, read: Callable[[Path], T]) -> T | None:
        """What `read` makes of a config's entry, None where there is none.

        `read` sees the files of one entry: if that was replaced meanwhile, it is called again, with the new one.

        Raises:
            StoreError: a file of the entry is missing, truncated or altered.
        """

        def checked(folder: Path) -> T:
            problem = find_entry_problem(folder, config, None, verify=True)
            if problem is not None:
                raise _not_whole(problem)
            return read(folder)

        try:
            return read_undisturbed(self.dir_for(config), checked)
        except FolderMissing:
            return None

    def get_or_produce(
        self, config: EvalConfig, produce: Producer, inputs: Mapping[str, str], *, rebuild: bool = True
    ) -> CacheEntry:
        """The entry of a config made from these inputs: found intact, or produced once and published by one rename.

        Whoever comes while another process produces it waits. What a crashed producer of the same key left is removed
        first. If `produce` raises, nothing changes.

        Args:
            inputs: content digests by name: eval data, target, tokenizer, template, ...
            rebuild: replace an entry that was made from other inputs or is damaged.

        Raises:
            StoreError: `rebuild` is off and the entry would have to be replaced; or `cache_dir` cannot be written to.
        """
        path, version = self.dir_for(config), digest([config.cache_key, sorted(inputs.items())])
        hit = CacheEntry(path, config.cache_key, hit=True, data_version=version)
        if self._found(config, inputs, rebuild).usable:
            return hit
        with self._locked(path):
            finding = self._found(config, inputs, rebuild)
            if finding.usable:
                return hit
            if finding.problem is not None:
                log.warning("%s is produced again: %s", path, finding.problem)
            if self._produce(config, produce, inputs, replace=finding.exists):
                return CacheEntry(path, config.cache_key, False, version, finding.problem)
        return self._entry_of_the_winner(config, inputs, hit)

    def invalidate(self, config: EvalConfig) -> bool:
        """Take a config's entry away by one rename, then delete it. Returns whether there was one.

        A production under way goes on, and will publish.

        Raises:
            StoreError: `cache_dir` cannot be written to.
        """
        final = self.dir_for(config)
        aside = make_sibling_path(final, ASIDE)
        with self._writing():
            existed = move_aside(final, aside)
        remove(aside)
        return existed

    def _examine(self, config: EvalConfig, inputs: Mapping[str, str] | None, verify: bool) -> _Finding:
        try:
            problem = read_undisturbed(
                self.dir_for(config), lambda folder: find_entry_problem(folder, config, inputs, verify)
            )
        except FolderMissing:
            return _Finding(exists=False)
        return _Finding(exists=True, problem=problem)

    def _found(self, config: EvalConfig, inputs: Mapping[str, str], rebuild: bool) -> _Finding:
        finding = self._examine(config, inputs, verify=True)
        if finding.problem is not None and not rebuild:
            raise StoreError(
                f"{self.dir_for(config)} does not fit, and rebuilding is off: {finding.problem}. "
                f"Allow rebuilding, or bring back what it was made from"
            )
        return finding

    def _produce(self, config: EvalConfig, produce: Producer, inputs: Mapping[str, str], replace: bool) -> bool:
        """Publish a new entry; False where another process was quicker."""
        final = self.dir_for(config)
        sweep(final)
        staging = make_sibling_path(final, STAGED)
        with self._writing():
            staging.mkdir()
        try:
            produce(staging)
            write_meta(staging, config, inputs)
            replace_folder(staging, final, make_sibling_path(final, ASIDE) if replace else None)
            return True
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        finally:
            remove(staging)

    def _entry_of_the_winner(self, config: EvalConfig, inputs: Mapping[str, str], hit: CacheEntry) -> CacheEntry:
        """Only a file system on which locks do not work leads here."""
        finding = self._examine(config, inputs, verify=True)
        if not finding.usable:
            raise StoreError(f"{hit.path}: another process published an entry that does not fit: {finding.problem}")
        return hit

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        with ExitStack() as stack:
            with self._writing():
                self.root.mkdir(parents=True, exist_ok=True)
                busy = f"{path} is being produced by another process: waiting for it"
                stack.enter_context(hold_lock(path.with_name(f"{path.name}.lock"), busy))
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"cache_dir {self.cache_dir}: expected a folder that this user may write to, found: {error}. "
                f"Choose another one, or correct its permissions"
            ) from error


@dataclass(frozen=True)
class _Finding:
    """What there is of an entry, and why it cannot be used."""

    exists: bool
    problem: str | None = None

    @property
    def usable(self) -> bool:
        return self.exists and self.problem is None


def _not_whole(problem: str) -> StoreError:
    return StoreError(f"{problem}. Produce the entry again, or invalidate it")
