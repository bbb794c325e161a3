"""A feature set: which samples have which features. A folder with refs.jsonl and manifest.json, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.storage.files import open_regular, publish_file, publish_json, read_json
from draftworks.storage.identity import DIGEST_LENGTH, digest

MANIFEST_SCHEMA = "draftworks.features.3"
REFS = "refs.jsonl"
MANIFEST = "manifest.json"
ADVICE = "Capture the features again: nothing that is stored will be captured twice."


@dataclass(frozen=True)
class FeatureSetIdentity:
    """Properties that all features of a set share.

    Attributes:
        target: digest of the target's weights.
        engine: name of the engine that captured them.
        numerics: revision of the engine's numerical results.
        dtype: of the features as they are read.
        last_normed: whether `last` was captured after the target's final norm.
        storage: how they are encoded in the store, as `capture.storage`; None: in `dtype`.
    """

    target: str | None = None
    engine: str | None = None
    numerics: int | None = None
    dtype: str | None = None
    last_normed: bool = True
    storage: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> FeatureSetIdentity:
        return cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})


@dataclass(frozen=True)
class FeatureSetManifest:
    """The manifest of a feature set, with its samples.

    Attributes:
        streams: names of the stored features of every sample.
        nbytes: of all distinct features.
        data_version: digest of the sorted keys: equal features have equal versions, in any store.
        stream_versions: a version for each stream: results that read some streams stay current when others change.
    """

    identity: FeatureSetIdentity
    streams: tuple[str, ...]
    samples: int
    tokens: int
    nbytes: int
    store: str
    data_version: str
    stream_versions: dict[str, str]
    refs_digest: str
    schema: str = MANIFEST_SCHEMA
    refs: tuple[SampleRef, ...] = field(default=(), repr=False)

    def version_of(self, names: Iterable[str]) -> str:
        """Return the content version of some streams; KeyError for an unknown stream."""
        return digest({name: self.stream_versions[name] for name in names})

    def leave_out(self, sample_ids: Iterable[str]) -> FeatureSetManifest:
        """Return the manifest of the set without these samples."""
        gone = set(sample_ids)
        if not gone:
            return self
        return make_manifest(
            [ref for ref in self.refs if ref.sample_id not in gone], self.identity, self.streams, self.store
        )


def make_manifest(
    refs: Sequence[SampleRef], identity: FeatureSetIdentity, streams: Sequence[str], store: str
) -> FeatureSetManifest:
    """Return the manifest of a feature set."""
    return _describe(refs, identity, streams, store, _write_lines(refs))


def _describe(
    refs: Sequence[SampleRef], identity: FeatureSetIdentity, streams: Sequence[str], store: str, lines: bytes
) -> FeatureSetManifest:
    sizes = {key: ref.feature_specs[name].nbytes for ref in refs for name, key in ref.feature_keys.items()}
    return FeatureSetManifest(
        identity=identity,
        streams=tuple(streams),
        samples=len(refs),
        tokens=sum(ref.num_tokens for ref in refs),
        nbytes=sum(sizes.values()),
        store=store,
        data_version=digest(sorted(sizes)),
        stream_versions={name: digest(sorted({ref.feature_keys[name] for ref in refs})) for name in streams},
        refs_digest=_digest(lines),
        refs=tuple(refs),
    )


def write_feature_set(
    folder: Path, refs: Sequence[SampleRef], identity: FeatureSetIdentity, streams: Sequence[str], store: str
) -> FeatureSetManifest:
    """Write refs.jsonl, then manifest.json, each atomically. The manifest makes the set complete."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = _write_lines(refs)
    manifest = _describe(refs, identity, streams, store, lines)
    record = asdict(replace(manifest, refs=()))  # `asdict` would copy every reference
    del record["refs"]
    record["identity"] = identity.to_json()
    with publish_file(folder / REFS) as staging:
        staging.write_bytes(lines)
    publish_json(folder / MANIFEST, record)
    return manifest


def read_feature_set(folder: Path) -> FeatureSetManifest:
    """Read and check a feature set.

    Raises:
        StoreError: a file is missing or unreadable, refs.jsonl is truncated or altered, or the schema is another.
    """
    manifest = _read_manifest(folder / MANIFEST)
    path = folder / REFS
    try:
        with open_regular(path) as stream:
            content = stream.read()
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error}). {ADVICE}") from error
    lines = content.decode(errors="replace").splitlines()
    if len(lines) != manifest["samples"]:
        raise StoreError(f"{path} is truncated: expected {manifest['samples']} lines, found {len(lines)}. {ADVICE}")
    if _digest(content) != manifest["refs_digest"]:
        raise StoreError(
            f"{path} is altered: expected digest {manifest['refs_digest']}, found {_digest(content)}. {ADVICE}"
        )
    refs = tuple(SampleRef.from_json(line) for line in lines)
    return FeatureSetManifest(**{**manifest, "streams": tuple(manifest["streams"]), "refs": refs})


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = read_json(path)
        manifest = {**manifest, "identity": FeatureSetIdentity.from_json(manifest["identity"])}
        FeatureSetManifest(**manifest)
    except FileNotFoundError as error:
        raise StoreError(f"no feature set in {path.parent}: {path.name} is missing. {ADVICE}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): it is truncated or altered. {ADVICE}") from error
    if manifest.get("schema") != MANIFEST_SCHEMA:
        raise StoreError(f"{path} has schema {manifest.get('schema')!r}, expected {MANIFEST_SCHEMA!r}. {ADVICE}")
    return manifest


def _write_lines(refs: Sequence[SampleRef]) -> bytes:
    return "".join(ref.to_json() + "\n" for ref in refs).encode()


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:DIGEST_LENGTH]


@dataclass(frozen=True)
class FeatureSource:
    """The samples of a feature set, and the store that has their features."""

    manifest: FeatureSetManifest
    store: FeatureStore


class OfflineManifestReader:
    """References of the samples of a feature set folder (`manifest`). Its features are not opened, nor looked for.

    Args:
        folder: the feature set.
        run_id: id of the run that reads it; the source task of its n-th sample is `{run_id}:{n as eight digits}`.
        strategy: name of the strategy that reads it.
        streams: names of the features that the strategy reads; None for all that the set has.
    """

    def __init__(
        self, folder: Path, run_id: str = "", strategy: str = "", streams: Sequence[str] | None = None
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._strategy = strategy
        self._streams = streams

    def read(self) -> list[SampleRef]:
        """Return the references in the set's order, with the set's sample ids, which its tokens have too.

        Raises:
            StoreError: the feature set is missing or damaged, or lacks one of the streams.
        """
        manifest = read_feature_set(self._folder)
        streams = tuple(manifest.streams if self._streams is None else self._streams)
        missing = [name for name in streams if name not in manifest.streams]
        if missing:
            raise StoreError(
                f"feature set {self._folder} has no streams {missing}, it has {sorted(manifest.streams)}. "
                f"Capture the features for strategy {self._strategy or 'that reads them'}"
            )
        return [self._claim(ref.select(streams), index) for index, ref in enumerate(manifest.refs)]

    def _claim(self, ref: SampleRef, index: int) -> SampleRef:
        return replace(ref, run_id=self._run_id, source_task_id=f"{self._run_id}:{index:08d}", strategy=self._strategy)
