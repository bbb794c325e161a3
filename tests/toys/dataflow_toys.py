"""Tasks, references and stores of the control plane for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftworks.features.contracts import FeatureHandle, FeatureSpec, KeyedFeatureStore, SampleRef
from draftworks.stream.control_client import RemoteMetadataStore
from draftworks.stream.control_server import ControlServer
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import MetadataStore, PromptTask
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore

LEASE_S = 10.0
NAMES = ("hf2", "last")
TOKEN = b"a secret of the tests"


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def toy_task(number: int, samples: int = 2, step: int = 0) -> PromptTask:
    ids = tuple(f"s{number}.{place}" for place in range(samples))
    return PromptTask(f"t{number}", "run", ids, step=step, num_tokens=8 * samples, metadata={"shares": [1, 2]})


def toy_slim_ref(sample_id: str, task_id: str = "", tokens: int = 5) -> SampleRef:
    return SampleRef(
        sample_id,
        "run",
        task_id,
        "mem://store",
        {name: f"{sample_id}/{name}" for name in NAMES},
        {name: FeatureSpec(name, (tokens, 16), "bfloat16") for name in NAMES},
        num_tokens=tokens,
        estimated_bytes=2 * tokens * 16 * len(NAMES),
    )


def refs_of(task: PromptTask) -> list[SampleRef]:
    return [toy_slim_ref(sample_id, task.task_id, 3 + place) for place, sample_id in enumerate(task.sample_ids)]


def controller_of(store: MetadataStore, clock: Callable[[], float], **options: object) -> DataFlowController:
    return DataFlowController("run", store, clock, **{"lease_s": LEASE_S, "consumer_lease_s": LEASE_S, **options})  # type: ignore[arg-type]


def ids_of(refs: Sequence[SampleRef]) -> list[str]:
    return [ref.sample_id for ref in refs]


def open_retaining_store(kind: str, folder: Path) -> MetadataStore:
    return InMemoryMetadataStore() if kind == "memory" else SQLiteMetadataStore(folder / "control" / "plane.db")


class ServedStore(RemoteMetadataStore):
    """A client, and the server in this process whose store it uses; `restart` puts another in the server's place."""

    def __init__(self, store: MetadataStore, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.server = ControlServer(store, TOKEN, clock=clock)
        super().__init__(self.server.address, TOKEN, retry_s=20.0)

    def restart(self) -> None:
        port = int(self.server.address.rpartition(":")[2])
        self.server.close()
        self.server = ControlServer(self.server.store, TOKEN, port=port, clock=self.clock)

    def close(self) -> None:
        super().close()
        self.server.close()
        self.server.store.close()


def superseded(ref: SampleRef) -> SampleRef:
    """The same sample, captured once more into other keys."""
    return replace(ref, feature_keys={name: key + "+" for name, key in ref.feature_keys.items()})


class KeyStore(KeyedFeatureStore):
    """A content-keyed store that has keys and no tensors."""

    uri = "toy://store"  # type: ignore[assignment]  # a property there

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def put(self, ref: SampleRef, tensors: Mapping[str, object]) -> SampleRef:  # type: ignore[override]
        self.keys.update(ref.feature_keys.values())
        return ref

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self.keys]

    def free(self, keys: Iterable[str]) -> int:
        gone = self.keys.intersection(keys)
        self.keys -= gone
        return len(gone)

    def get(self, ref: SampleRef) -> tuple[dict, FeatureHandle]:
        raise NotImplementedError

    def release(self, handle: FeatureHandle) -> None:
        raise NotImplementedError

    def abort(self, sample_id: str) -> None:
        raise NotImplementedError

    def gc(self) -> int:
        return 0

    def health(self) -> dict[str, object]:
        return {}

    def estimate_bytes(self, ref: SampleRef) -> int:
        return ref.estimated_bytes

    def refresh(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
