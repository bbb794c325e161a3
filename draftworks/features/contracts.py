"""Types exchanged by capture, stores and training. Only `TrainBatch` carries tensors; the others carry metadata.

Names and fields follow the DataFlow runtime of SpecForge (pull request 648).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.storage.files import parse_json

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 1
_SIZES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1},
    **{"int64": 8, "int32": 4, "bool": 1},
}


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and dtype of one stored tensor, known without opening it.

    `target_repr` is the kind of a teacher tensor: "logits", "pruned_logits" or "hidden_state"; None for other features.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device_hint: str = "cpu"
    required: bool = True
    target_repr: str | None = None
    target_meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        size = _SIZES[self.dtype]
        for dimension in self.shape:
            size *= dimension
        return size


@dataclass(frozen=True)
class CaptureConfig:
    """The streams that an engine returns for a sample: (S, H) for every tap, in this order, and `last`.

    Attributes:
        aux_layer_ids: hf_index of the taps, ascending.
        hidden_size: H, of every stream.
        dtype: the dtype in which the target computes; features may be stored in another.
    """

    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*(f"hf{index}" for index in self.aux_layer_ids), "last")


@dataclass(frozen=True)
class SampleRef:
    """The address of a sample's features: names, keys, specs and store. Never the tensors themselves."""

    sample_id: str
    run_id: str
    source_task_id: str
    feature_store_uri: str
    feature_keys: Mapping[str, str]
    feature_specs: Mapping[str, FeatureSpec]
    strategy: str = ""
    schema_version: int = SCHEMA_VERSION
    target_model_version: str = "unknown"
    draft_weight_version: str | None = None
    tokenizer_version: str = "unknown"
    num_tokens: int = 0
    estimated_bytes: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def select(self, names: tuple[str, ...]) -> SampleRef:
        """Return the same sample with only the features `names`. Raises KeyError that names missing features."""
        missing = [name for name in names if name not in self.feature_keys]
        if missing:
            raise KeyError(f"sample {self.sample_id} has no feature {missing}; it has {sorted(self.feature_keys)}")
        return replace(
            self,
            feature_keys={name: self.feature_keys[name] for name in names},
            feature_specs={name: self.feature_specs[name] for name in names},
        )

    def to_json(self) -> str:
        assert_no_tensors(self)
        specs = {name: vars(spec) for name, spec in self.feature_specs.items()}
        return json.dumps({**vars(self), "feature_specs": specs}, sort_keys=True)  # `asdict` would copy all of it

    @classmethod
    def from_json(cls, text: str) -> SampleRef:
        fields = parse_json(text)
        if fields.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"`SampleRef` of schema {fields.get('schema_version')}, expected {SCHEMA_VERSION}")
        specs = {
            name: FeatureSpec(**{**spec, "shape": tuple(spec["shape"])})
            for name, spec in fields.pop("feature_specs").items()
        }
        return cls(feature_specs=specs, **fields)


@dataclass(frozen=True)
class StoredFile:
    """A file, or object, of a store.

    Attributes:
        keys: of its features; for a store that keeps only digests of them, the file's name.
        written: when it was published, in seconds since the epoch.
    """

    keys: tuple[str, ...]
    nbytes: int
    written: float


@dataclass(frozen=True)
class FeatureHandle:
    """A lease on fetched tensors. A handle whose lease has ended releases nothing."""

    sample_id: str
    lease_token: str


@dataclass
class TrainBatch:
    """Collated tensors of several samples: the only type of the data plane that carries tensors.

    Attributes:
        num_tokens: the samples' tokens without padding, for rates; 0 where they were not counted.
        documents: lengths of the samples in the one row of a packed batch; empty for a padded batch, one sample per
            row.
        ends_step: whether this is the last batch of its rank in an optimizer step.
    """

    tensors: dict[str, Tensor]
    sample_ids: tuple[str, ...]
    num_tokens: int = 0
    documents: tuple[int, ...] = ()
    ends_step: bool = True

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def to(self, device: Any) -> TrainBatch:
        tensors = {k: v.to(device, non_blocking=True) for k, v in self.tensors.items()}
        return replace(self, tensors=tensors)

    def pin_memory(self) -> TrainBatch:
        """Return a copy in page-locked memory, from which `to` copies to a GPU asynchronously."""
        return replace(self, tensors={k: v.pin_memory() for k, v in self.tensors.items()})


class FeatureStore(ABC):
    """Stores features by sample. Implementations differ in medium, not in meaning."""

    lease_bound: bool = True
    """Whether the tensors of `get` are valid only until `release`, so that a reader has to copy them."""

    lookahead: int = 0
    """Number of batches ahead at which a reader calls `expect`; 0: the store reads nothing ahead."""

    @abstractmethod
    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Store `tensors` under `ref.feature_keys`; return the ref with uri, specs and bytes filled in."""

    @abstractmethod
    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Return tensors by feature name, checked against the ref's specs, under a lease.

        Raises:
            StoreError: a key is absent, or what is stored is truncated, altered or of another shape or dtype.
        """

    def expect(self, refs: Sequence[SampleRef]) -> None:  # noqa: B027 - most stores read nothing ahead
        """Announce samples that will be read soon, in this order. A hint: a store may read them ahead."""

    def forget_expected(self) -> None:  # noqa: B027
        """Drop what was announced and not read: the reader has stopped."""

    def stop_waiting(self) -> None:  # noqa: B027 - most stores never wait
        """Make calls of `get` that wait for features raise StoreError now: their reader has gone."""

    @abstractmethod
    def release(self, handle: FeatureHandle) -> None:
        """Return the lease; a stale handle is a no-op."""

    @abstractmethod
    def abort(self, sample_id: str) -> None:
        """Discard what was put for a sample and is not published yet."""

    @abstractmethod
    def gc(self) -> int:
        """Remove what is unreachable (staging files of crashed writers, expired leases); return the bytes freed."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Return counts and sizes for people."""

    def estimate_bytes(self, ref: SampleRef) -> int:
        """Return the bytes that the sample's tensors take or will take in this store, as far as its specs are known."""
        return sum(spec.nbytes for spec in ref.feature_specs.values())


class KeyedFeatureStore(FeatureStore):
    """A store that finds features by their content keys, whichever sample or process stored them.

    `put` stores no key twice, so only missing keys need to be captured.
    """

    @property
    @abstractmethod
    def uri(self) -> str:
        """The store's name in references and manifests."""

    @abstractmethod
    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that are not stored, in the order given.

        Raises:
            StoreError: the store is damaged, so missing and damaged features cannot be told apart.
        """

    @abstractmethod
    def free(self, keys: Iterable[str]) -> int:
        """Remove features by key; return the bytes freed by this call. Unknown keys are ignored.

        Freed keys are missing at once, and can be put again. Where `get` returns no copies, what is under lease in this
        process takes its bytes until its last lease ends.
        """

    def find_unused(self, used: Collection[str]) -> list[StoredFile]:
        """Return the files of which no feature has a key in `used`, and that `remove_files` would remove.

        Raises:
            StoreError: the store is damaged, or of a kind that keeps nothing for longer than a run.
        """
        raise StoreError(f"{self.uri}: a store of this kind cannot be pruned")

    def remove_files(self, files: Iterable[StoredFile]) -> int:
        """Remove files that `find_unused` returned; return the bytes freed. Their features are missing at once."""
        return self.free(key for file in files for key in file.keys)

    @abstractmethod
    def refresh(self) -> None:
        """Read what other processes have published or removed since."""

    @abstractmethod
    def flush(self) -> None:
        """Publish what is buffered."""

    @abstractmethod
    def close(self) -> None:
        """Publish what is buffered, and free the resources of reading."""


_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
"""Types of nearly every leaf, which need no look at their attributes."""
_PLAIN_CONTAINERS = frozenset((dict, list, tuple, set, frozenset))
"""Exact types that cannot be tensors, so that only their items are looked at."""
_TENSOR_ATTRIBUTES = ("dtype", "shape", "device")


def assert_no_tensors(value: Any, path: str = "value") -> None:
    """Raise TypeError with the path of the first tensor or array inside dataclasses, mappings and sequences."""
    kind = type(value)
    if kind in _PLAIN:
        return
    names = None
    if kind not in _PLAIN_CONTAINERS:
        names = _read_field_names(kind)
        if names is None:
            root = kind.__module__.split(".")[0]
            if root in ("torch", "numpy") or all(hasattr(value, name) for name in _TENSOR_ATTRIBUTES):
                raise TypeError(f"{path} is a {kind.__name__}: the control plane carries no tensors")
    if names is not None:
        for name in names:
            if type(item := getattr(value, name)) not in _PLAIN:
                assert_no_tensors(item, f"{path}.{name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if type(item) not in _PLAIN:
                assert_no_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            if type(item) not in _PLAIN:
                assert_no_tensors(item, f"{path}[{index}]")


@cache
def _read_field_names(kind: type) -> tuple[str, ...] | None:
    """Return the field names of a dataclass; None for other types, and for a dataclass that looks like a tensor."""
    names = getattr(kind, "__dataclass_fields__", None)
    if names is None or all(name in names or hasattr(kind, name) for name in _TENSOR_ATTRIBUTES):
        return None
    return None if kind.__module__.split(".")[0] in ("torch", "numpy") else tuple(names)
