"""The cache of features is bounded, shared and never believed without its checksum."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from draftworks.features.feature_cache import FeatureCache
from draftworks.features.object_shard import SampleBytes, encode_shard

SIZE = 1 << 10


class Kept:
    """A sample of `SIZE` bytes, and its buffer."""

    def __init__(self, index: int) -> None:
        self.tensors = {f"{index:032x}": torch.full((SIZE // 4,), index, dtype=torch.int32)}
        header = encode_shard(self.tensors).header
        self.bytes = SampleBytes({key: header.entries[key] for key in self.tensors})  # type: ignore[misc]
        self.content = self.bytes.join([tensor.numpy().tobytes() for tensor in self.tensors.values()])


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("??/*"))


def test_what_is_kept_is_read_by_every_process(tmp_path: Path):
    one, two = FeatureCache(tmp_path, 1 << 20), FeatureCache(tmp_path, 1 << 20)
    kept = Kept(1)
    assert one.read(kept.bytes) is None
    one.keep(kept.bytes, kept.content)
    for cache in (one, two):
        found = cache.read(kept.bytes)
        assert found == kept.content
        assert {k: t.tolist() for k, t in kept.bytes.restore(found).items()} == {
            k: t.tolist() for k, t in kept.tensors.items()
        }


def test_the_limit_holds_and_what_was_read_last_stays(tmp_path: Path):
    caches = [FeatureCache(tmp_path, 10 * SIZE) for _ in range(3)]
    favourite = Kept(0)
    caches[0].keep(favourite.bytes, favourite.content)
    for index in range(1, 40):
        os.utime(next(tmp_path.glob(f"??/{favourite.bytes.name}")), (2e9, 2e9))  # as if read just now
        kept = Kept(index)
        caches[index % 3].keep(kept.bytes, kept.content)
        assert used(tmp_path) <= 10 * SIZE
        assert caches[(index + 1) % 3].read(kept.bytes) == kept.content
    assert caches[1].read(favourite.bytes) == favourite.content
    assert used(tmp_path) > 5 * SIZE


def test_threads_and_caches_stay_within_the_limit(tmp_path: Path):
    caches = [FeatureCache(tmp_path, 16 * SIZE) for _ in range(4)]

    def keep(index: int) -> None:
        kept = Kept(index % 50)
        caches[index % 4].keep(kept.bytes, kept.content)
        found = caches[(index + 1) % 4].read(kept.bytes)
        assert found is None or found == kept.content

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(keep, range(200)))
    assert used(tmp_path) <= 16 * SIZE
    assert not list(tmp_path.glob("??/*.tmp"))


@pytest.mark.parametrize("damage", ["alter", "truncate"])
def test_a_damaged_file_is_read_again_from_its_store(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture):
    kept = Kept(1)
    FeatureCache(tmp_path, 1 << 20).keep(kept.bytes, kept.content)
    path = next(tmp_path.glob("??/*"))
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content if damage == "alter" else content[:-1])
    assert FeatureCache(tmp_path, 1 << 20).read(kept.bytes) is None
    assert ("damaged" in caplog.text) == (damage == "alter")


def test_a_folder_that_cannot_be_written_to_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    cache, kept = FeatureCache(tmp_path / "file", 1 << 20), Kept(1)
    for _ in range(2):
        cache.keep(kept.bytes, kept.content)
        assert cache.read(kept.bytes) is None
    assert caplog.text.count("are not kept") == 1


def test_what_is_too_large_is_not_kept(tmp_path: Path):
    cache, kept = FeatureCache(tmp_path, 2 * SIZE), Kept(1)
    cache.keep(kept.bytes, kept.content)
    assert used(tmp_path) == 0


def test_a_count_that_a_killed_process_left_too_high_is_corrected(tmp_path: Path):
    cache = FeatureCache(tmp_path, 10 * SIZE)
    (tmp_path / "used").write_text(f"{10 * SIZE:020d}")
    kept = Kept(1)
    cache.keep(kept.bytes, kept.content)
    assert cache.count()["cache_bytes"] == SIZE
    assert cache.read(kept.bytes) == kept.content
