"""The local store: what is put comes back, once, from any process; damage is reported, not read."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from features_toys import filled_store, toy_ref, toy_tensors

from draftworks.errors import StoreError
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.shards import staging_name


def test_same_key_put_twice_is_stored_once(tmp_path: Path):
    store, refs = filled_store(tmp_path, 5)
    for ref in refs:
        store.put(ref, toy_tensors(ref))
    store.flush()
    again = LocalFeatureStore(tmp_path)
    again.put(refs[0], toy_tensors(refs[0]))
    again.put(refs[0], toy_tensors(refs[0]))
    again.flush()
    assert again.health()["shards"] == 1
    assert again.health()["tensors"] == 10


def test_shards_are_published_as_they_fill(tmp_path: Path):
    filled_store(tmp_path, 20, shard_bytes=200)
    assert len(list((tmp_path / "shards").iterdir())) > 3
    assert LocalFeatureStore(tmp_path).health()["tensors"] == 40
    assert not list((tmp_path / "staging").iterdir())


def test_removed_shard_is_forgotten_on_refresh(tmp_path: Path):
    store, refs = filled_store(tmp_path, 3)
    next((tmp_path / "shards").iterdir()).unlink()
    store.refresh()
    assert store.health()["tensors"] == 0
    with pytest.raises(StoreError, match="s1.*not in the feature store"):
        store.get(refs[1])


def test_abort_forgets_what_no_other_sample_wants(tmp_path: Path):
    store = LocalFeatureStore(tmp_path)
    mine, shared = (
        toy_ref(1),
        replace(toy_ref(1), sample_id="s1b", feature_keys={"last": toy_ref(1).feature_keys["last"]}),
    )
    store.put(mine, toy_tensors(mine))
    store.put(shared, {"last": toy_tensors(mine)["last"]})
    store.abort("s1")
    store.flush()
    assert store.contains(mine.feature_keys["last"])
    assert not store.contains(mine.feature_keys["hf2"])


def test_gc_sweeps_staging_of_dead_writers_only(tmp_path: Path):
    store = LocalFeatureStore(tmp_path)
    script = "from draftworks.features.shards import staging_name; print(staging_name())"
    dead = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    names = [dead, staging_name(), "elsewhere.example~7~abc.tmp"]
    for name in names:
        (tmp_path / "staging" / name).write_bytes(b"12345")
    assert store.gc() == 5
    assert {path.name for path in (tmp_path / "staging").iterdir()} == set(names[1:])


def test_truncated_shard_is_reported_when_it_is_needed(tmp_path: Path):
    _, refs = filled_store(tmp_path, 2)
    shard = next((tmp_path / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-3])
    store = LocalFeatureStore(tmp_path)
    with pytest.raises(StoreError, match=rf"sample s0.*{shard.name}.*truncated"):
        store.get(refs[0])
    with pytest.raises(StoreError, match=rf"{shard.name}.*truncated"):
        store.find_missing(["a" * 32])
    assert shard.exists()


def test_altered_sample_is_reported_and_others_are_read(tmp_path: Path):
    _, refs = filled_store(tmp_path, 3)
    shard = next((tmp_path / "shards").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0xFF
    shard.write_bytes(content)
    store, bad = LocalFeatureStore(tmp_path), []
    for ref in refs:
        try:
            store.get(ref)
        except StoreError as error:
            bad.append(str(error))
    assert len(bad) == 1
    assert shard.name in bad[0]
    assert "altered: sample key" in bad[0]
    unchecked = LocalFeatureStore(tmp_path, verify_reads=False)
    assert all(unchecked.get(ref) for ref in refs)


def test_verify_reports_every_bad_file(tmp_path: Path):
    store, _ = filled_store(tmp_path, 20, shard_bytes=200)
    assert store.verify().ok
    shards = sorted((tmp_path / "shards").iterdir())
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    shards[1].write_bytes(b"no header")
    altered = bytearray(shards[2].read_bytes())
    altered[-1] ^= 1
    shards[2].write_bytes(altered)
    check = LocalFeatureStore(tmp_path).verify()
    assert not check.ok
    assert len(check.problems) == 3
    assert all(any(shard.name in text for text in check.problems) for shard in shards[:3])


def test_good_shard_in_the_place_of_a_damaged_one_makes_the_store_sound(tmp_path: Path):
    _, refs = filled_store(tmp_path, 2)
    shard = next((tmp_path / "shards").iterdir())
    shard.write_bytes(b"no header")
    store = LocalFeatureStore(tmp_path)
    for ref in refs:
        store.put(ref, toy_tensors(ref))
    store.flush()
    assert [path.name for path in (tmp_path / "shards").iterdir()] == [shard.name]
    store.require_sound()
    assert torch.equal(store.get(refs[0])[0]["last"], toy_tensors(refs[0])["last"])


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: b"no header"])
def test_shard_that_another_process_replaced_is_sound_after_refresh(tmp_path: Path, damage):
    _, refs = filled_store(tmp_path, 2)
    shard = next((tmp_path / "shards").iterdir())
    whole = shard.read_bytes()
    shard.write_bytes(damage(whole))
    store = LocalFeatureStore(tmp_path)
    store.refresh()
    assert store.health()["damaged"]
    shard.unlink()
    shard.write_bytes(whole)
    store.refresh()
    assert not store.find_missing(refs[0].feature_keys.values())


def test_a_tensor_is_verified_once_by_a_store(tmp_path: Path):
    _, refs = filled_store(tmp_path, 1)
    store = LocalFeatureStore(tmp_path)
    store.get(refs[0])
    shard = next((tmp_path / "shards").iterdir())
    with shard.open("r+b") as stream:
        stream.seek(-1, 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 2)
        stream.write(bytes([byte ^ 1]))
    store.get(refs[0])
    assert not store.verify().ok
    with pytest.raises(StoreError, match="altered"):
        LocalFeatureStore(tmp_path).get(refs[0])


WRITER = """
import json, sys, torch
from pathlib import Path
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
store = LocalFeatureStore(Path(sys.argv[1]), shard_bytes=400)
for i in range(int(sys.argv[2]), int(sys.argv[3])):
    ref = SampleRef(f"s{i}", "", "", "", {"last": f"{i:032x}"}, {})
    store.put(ref, {"last": torch.full((5, 4), float(i))})
store.close()
"""


def test_two_processes_write_one_store(tmp_path: Path):
    commands = [[sys.executable, "-c", WRITER, str(tmp_path), *span] for span in (("0", "60"), ("40", "100"))]
    writers = [subprocess.Popen(command) for command in commands]
    assert [writer.wait() for writer in writers] == [0, 0]
    store = LocalFeatureStore(tmp_path)
    assert store.verify().ok
    assert not store.find_missing(f"{i:032x}" for i in range(100))


def test_concurrent_reads_agree(tmp_path: Path):
    store, refs = filled_store(tmp_path, 30, shard_bytes=300)
    small = LocalFeatureStore(tmp_path, max_open=2)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda ref: small.get(ref)[0]["last"], refs * 4))
    assert all(torch.equal(got, toy_tensors(ref)["last"]) for got, ref in zip(results, refs * 4))
