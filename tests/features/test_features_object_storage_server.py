"""Features in a real S3 server: the contract of all stores, and a server that is killed, refuses, or is not there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from features_toys import toy_ref, toy_tensors
from object_toys import ObjectHarness
from s3_server import BUCKET, S3Server, set_keys
from store_contract import read
from store_harness import put
from store_keyed_contract import PruningContract, keys_of
from waiting import HANG_S, meanwhile, wait_until

from draftworks.config.features import ObjectFeaturesSpec
from draftworks.config.run_files import StoreSpec
from draftworks.errors import ConfigError, StoreError
from draftworks.features.object_feature_store import ObjectFeatureStore
from draftworks.features.open_store import open_store, open_store_to_write
from draftworks.storage.object_store import ObjectStore

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    running.start()
    yield running
    if running.process is not None:
        running.kill()


@dataclass
class ServerHarness(ObjectHarness):
    """A store at a URL of the server, opened as a run file has it opened."""

    endpoint: str = ""
    port: int = 0
    place: str = field(default="")

    def connect(self) -> ObjectStore:
        return S3Server(self.folder, self.port).connect(self.place)


class TestObjectFeatureStoreOnAServer(PruningContract):
    @pytest.fixture
    def harness(self, tmp_path: Path, server: S3Server) -> ServerHarness:
        return ServerHarness(tmp_path / "store", port=server.port, place=f"contract/{tmp_path.name}")


def spec(
    folder: Path, server: S3Server, user: str = "WRITER", bucket: str = BUCKET, retry_s: float = HANG_S
) -> StoreSpec:
    set_keys(os.environ)
    objects = ObjectFeaturesSpec(
        url=f"s3://{bucket}/stores/{folder.name}",
        access=server.access(user, retry_s),
        cache=folder / "cache",
        cache_gb=1,
    )
    return StoreSpec(kind="s3", root=folder / "notes", objects=objects)


def test_keys_that_are_wrong_or_may_not_write_are_said_before_anything_is_put(tmp_path: Path, server: S3Server):
    with pytest.raises(StoreError, match="does not accept these keys"):
        open_store_to_write(spec(tmp_path, server, "STRANGER"))
    with pytest.raises(StoreError, match=r"these keys may not write here \(AccessDenied\)"):
        open_store_to_write(spec(tmp_path, server, "READER"))
    with pytest.raises(StoreError, match=f"s3://nobodys-bucket/stores/{tmp_path.name}.*(no such bucket|may not write)"):
        open_store_to_write(spec(tmp_path, server, "READER", bucket="nobodys-bucket"))
    nobody = S3Server(tmp_path)
    with pytest.raises(StoreError, match="could not be reached"):
        open_store_to_write(spec(tmp_path, nobody, retry_s=0.5))


def test_who_may_only_read_reads(tmp_path: Path, server: S3Server):
    with_rights = open_store_to_write(spec(tmp_path, server))
    ref = put(with_rights, 1)
    reader = open_store(spec(tmp_path, server, "READER"))
    found, _ = reader.get(ref)
    assert found["last"].tolist() == toy_tensors(toy_ref(1))["last"].tolist()
    reader.put(toy_ref(2), toy_tensors(toy_ref(2)))
    with pytest.raises(StoreError, match="may not write"):
        reader.flush()


def test_a_server_that_is_killed_and_started_again_is_waited_for(tmp_path: Path, server: S3Server):
    harness = ServerHarness(tmp_path / "store", port=server.port, place="killed", cached=False)
    store = harness.open()
    refs = [put(store, index) for index in range(3)]

    def start_again() -> None:
        time.sleep(1.0)
        server.start()

    server.kill()
    with meanwhile(start_again):
        refs.append(put(store, 3))
    for ref in refs:
        store.release(read(harness, store, ref))
    assert isinstance(store, ObjectFeatureStore)
    again = harness.open()
    assert again.find_missing(keys_of(0, 1, 2, 3)) == []
    assert harness.leftovers() == []


def test_a_server_killed_while_it_is_written_to_leaves_whole_samples(tmp_path: Path, server: S3Server):
    harness = ServerHarness(tmp_path / "store", port=server.port, place="while", cached=False)
    store, done, stop = harness.open(), [], threading.Event()

    def write() -> None:
        while not stop.is_set():
            done.append(put(store, len(done)))

    with meanwhile(write):
        try:
            wait_until(lambda: done)
            time.sleep(0.3)  # somewhere in a put
            server.kill()
            before = len(done)
            server.start()
        finally:
            stop.set()
    assert 0 < before < len(done)
    reader = harness.open()
    for ref in done:
        reader.release(read(harness, reader, ref))
    assert reader.find_missing(keys_of(*range(len(done)))) == []


def test_keys_that_the_environment_lacks_are_named(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch):
    wanted = spec(tmp_path, server)
    monkeypatch.delenv("WRITER_SECRET")
    with pytest.raises(ConfigError, match="the environment has no WRITER_SECRET"):
        open_store(wanted)
