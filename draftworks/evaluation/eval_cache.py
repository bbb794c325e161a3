"""`EvalConfig`, and the cache of evaluation features with an entry for each: `{cache_dir}/eval_cache/{key}/`. No torch.

Fields, their order, the split between identity and execution, the key, publishing by rename and the names follow
`EvalConfig` and `EvalCache` of SpecForge (pull request 639). In addition an entry records content digests of its inputs and
of its own files; an entry that no longer fits is produced again, and the reason is logged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from draftworks.config.strict_yaml import describe_validation_error
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.artifacts import FileManifest, FileRecord, list_files
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.files import (
    ASIDE,
    MAX_JSON_BYTES,
    STAGED,
    FolderMissing,
    describe_changes,
    make_sibling_path,
    move_aside,
    read_bytes,
    read_undisturbed,
    remove,
    replace_folder,
    sweep,
)
from draftworks.storage.identity import DIGEST_LENGTH, digest
from draftworks.storage.lease import Lease


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation: a target, an eval set and a tap set.

    Attributes:
        target_revision: of a hub model; None and "" are the same.
        aux_hidden_state_layer_ids: the captured streams, in their order.
        micro_batch_size: how the evaluation is run; not part of the identity.
        cache_dir: where features are stored; not part of the identity.

    Raises:
        ConfigError: a layer id is not an integer, or a text is not a string that UTF-8 can encode.
    """

    eval_data_path: str
    target_model_path: str = ""
    target_revision: str | None = ""
    tokenizer_path: str = ""
    chat_template: str = ""
    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    max_len: int = 2048
    micro_batch_size: int = 1
    cache_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        ids = tuple(self.aux_hidden_state_layer_ids)
        if any(type(layer) is not int for layer in ids):
            raise ConfigError(f"aux_hidden_state_layer_ids: expected integers, found {ids}")
        object.__setattr__(self, "aux_hidden_state_layer_ids", ids)
        for text in self.identity_fields():
            # Half a surrogate pair has no UTF-8 form, and JSON writes two halves as it writes their character: two
            # different configs would have the same key.
            if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
                raise ConfigError(f"identity of an evaluation: expected strings valid in UTF-8, found {text!a}")

    def identity_fields(self) -> tuple[str, str, str, str, str, str, str]:
        """Return all values that decide the features, in SpecForge's order."""
        return (
            self.eval_data_path,
            self.target_model_path,
            self.target_revision or "",
            self.tokenizer_path,
            self.chat_template,
            ",".join(map(str, self.aux_hidden_state_layer_ids)),
            str(self.max_len),
        )

    @property
    def cache_key(self) -> str:
        """SHA-256 of the identity as JSON, 16 hex digits; equal to SpecForge's key."""
        text = json.dumps(self.identity_fields(), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


SCHEMA_VERSION = 1
META = "eval_cache_meta.json"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Errors of a rename to a path that another process has created."""


class EntryMeta(BaseModel):
    """Contents of eval_cache_meta.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    key: str
    identity: tuple[str, ...]
    inputs: dict[str, str]
    files: dict[str, FileRecord]


def write_meta(folder: Path, config: EvalConfig, inputs: Mapping[str, str]) -> None:
    """Write eval_cache_meta.json: the files in `folder` and the inputs that they were made from."""
    files = dict(FileManifest.record(folder, list_files(folder)).files)
    meta = EntryMeta(key=config.cache_key, identity=config.identity_fields(), inputs=dict(inputs), files=files)
    (folder / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")


def find_entry_problem(folder: Path, config: EvalConfig, inputs: Mapping[str, str] | None, verify: bool) -> str | None:
    """Return why a folder is not the entry of a config; None if it is.

    Args:
        inputs: the inputs it must have been made from; None for any.
        verify: compare digests of files, not only sizes.
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


Producer = Callable[[Path], object]
"""Fills the empty folder it is given."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """A published entry.

    Attributes:
        hit: whether it existed, or another process published it while this one waited.
        data_version: digest of key and inputs.
        rebuilt_because: problem of the entry that this one replaced; None if it replaced none.
    """

    path: Path
    key: str
    hit: bool
    data_version: str
    rebuilt_because: str | None = None


@dataclass(frozen=True)
class EvalCache:
    """A folder of evaluation features. Entries are complete or absent, for any number of processes killed at any point.

    It knows nothing of ranks: the caller produces on one rank while the others wait.
    """

    cache_dir: Path

    @classmethod
    def for_config(cls, config: EvalConfig) -> EvalCache:
        """Return the cache in the config's `cache_dir`.

        Raises:
            ValueError: its `cache_dir` is not set.
        """
        if not config.cache_dir:
            raise ValueError("`EvalConfig.cache_dir` is not set: expected the folder of the evaluation cache")
        return cls(Path(config.cache_dir))

    @staticmethod
    def key(config: EvalConfig) -> str:
        return config.cache_key

    @property
    def root(self) -> Path:
        return self.cache_dir / "eval_cache"

    def dir_for(self, config: EvalConfig) -> Path:
        """Return the folder of a config's entry, which need not exist."""
        return self.root / config.cache_key

    def try_get(
        self, config: EvalConfig, inputs: Mapping[str, str] | None = None, *, verify: bool = False
    ) -> Path | None:
        """Return the folder of a config's entry if its files exist with their sizes, else None.

        The entry may be replaced while its path is in use.

        Args:
            inputs: the inputs it must have been made from; None for any.
            verify: also compare digests, and raise if an entry exists but does not fit.

        Raises:
            StoreError: `verify` is set, and a file is missing, truncated or altered, or the inputs differ.
        """
        finding = self._examine(config, inputs, verify)
        if verify and finding.problem is not None:
            raise _damaged_entry_error(finding.problem)
        return self.dir_for(config) if finding.is_usable else None

    def get_or_produce(
        self, config: EvalConfig, produce: Producer, inputs: Mapping[str, str], *, rebuild: bool = True
    ) -> CacheEntry:
        """Return the entry of a config made from these inputs; produce and publish it by one rename if needed.

        A process that comes while another one produces the entry waits for it. Files that a crashed producer of the
        same key left are removed first. If `produce` raises, nothing changes.

        Args:
            inputs: content digests by name: eval data, target, tokenizer, template, …
            rebuild: whether to replace an entry that was made from other inputs or is damaged.

        Raises:
            StoreError: `rebuild` is off and the entry would have to be replaced; or `cache_dir` cannot be written to.
        """
        path, version = self.dir_for(config), digest([config.cache_key, sorted(inputs.items())])
        hit = CacheEntry(path, config.cache_key, hit=True, data_version=version)
        if self._find(config, inputs, rebuild).is_usable:
            return hit
        with self._locked(path) as lease:
            finding = self._find(config, inputs, rebuild)
            if finding.is_usable:
                return hit
            if finding.problem is not None:
                log.warning("%s is produced again: %s", path, finding.problem)
            if self._produce(config, produce, inputs, lease, replace=finding.exists):
                return CacheEntry(path, config.cache_key, False, version, finding.problem)
        return self._use_other_entry(config, inputs, hit)

    def invalidate(self, config: EvalConfig) -> bool:
        """Remove a config's entry: one rename, then deletion. Return whether there was one.

        A process that is producing the entry goes on and will publish it.

        Raises:
            StoreError: `cache_dir` cannot be written to.
        """
        final = self.dir_for(config)
        aside = make_sibling_path(final, ASIDE)
        with self._writing():
            existed = move_aside(final, aside)
        remove(aside)
        return existed

    def _examine(self, config: EvalConfig, inputs: Mapping[str, str] | None, verify: bool) -> _FoundEntry:
        try:
            problem = read_undisturbed(
                self.dir_for(config), lambda folder: find_entry_problem(folder, config, inputs, verify)
            )
        except FolderMissing:
            return _FoundEntry(exists=False)
        return _FoundEntry(exists=True, problem=problem)

    def _find(self, config: EvalConfig, inputs: Mapping[str, str], rebuild: bool) -> _FoundEntry:
        finding = self._examine(config, inputs, verify=True)
        if finding.problem is not None and not rebuild:
            raise StoreError(
                f"{self.dir_for(config)} does not fit, and rebuilding is off: {finding.problem}. "
                f"Allow rebuilding, or restore the inputs that it was made from"
            )
        return finding

    def _produce(
        self, config: EvalConfig, produce: Producer, inputs: Mapping[str, str], lease: Lease, replace: bool
    ) -> bool:
        """Publish a new entry; return False if another process published one first."""
        final = self.dir_for(config)
        sweep(final)
        staging = make_sibling_path(final, STAGED)
        with self._writing():
            staging.mkdir()
        try:
            produce(staging)
            write_meta(staging, config, inputs)
            replace_folder(staging, final, make_sibling_path(final, ASIDE) if replace else None, lease.confirm)
            return True
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        finally:
            remove(staging)

    def _use_other_entry(self, config: EvalConfig, inputs: Mapping[str, str], hit: CacheEntry) -> CacheEntry:
        """Return the entry that another process published; happens only where the lock was lost."""
        finding = self._examine(config, inputs, verify=True)
        if not finding.is_usable:
            raise StoreError(f"{hit.path}: another process published an entry that does not fit: {finding.problem}")
        return hit

    @contextmanager
    def _locked(self, path: Path) -> Iterator[Lease]:
        with ExitStack() as stack:
            with self._writing():
                self.root.mkdir(parents=True, exist_ok=True)
                busy = f"{path} is being produced by another process: waiting for it"
                lease = stack.enter_context(hold_lock(path.with_name(f"{path.name}.lock"), busy))
            yield lease

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
class _FoundEntry:
    """Whether an entry exists, and why it cannot be used."""

    exists: bool
    problem: str | None = None

    @property
    def is_usable(self) -> bool:
        return self.exists and self.problem is None


def _damaged_entry_error(problem: str) -> StoreError:
    return StoreError(f"{problem}. Produce the entry again, or invalidate it")
