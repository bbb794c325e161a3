"""Features and answers that earlier versions kept below names are found by the weights that they are of."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from draftworks.storage import legacy_stores
from draftworks.storage.artifacts import ArtifactStore, BuildResult
from draftworks.storage.legacy_stores import find_answers, find_store

WEIGHTS, OTHERS = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "var")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "feature_store"


def captured(artifacts: ArtifactStore, target: str, weights: str) -> None:
    artifacts.obtain("training_features", target, {"target": weights}, lambda out: BuildResult("v"))


def stored(root: Path, name: str, *files: str) -> None:
    for file in files:
        path = root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file)


def shards(place: Path) -> set[str]:
    return {path.name for path in (place / "shards").glob("*.safetensors")}


def test_nothing_is_made_where_nothing_is_kept(root, artifacts):
    assert find_store(root, WEIGHTS, "a", artifacts) == root / WEIGHTS
    assert not root.exists()


@pytest.mark.parametrize("asked_as", ["a", "renamed"])
def test_a_named_store_is_used_as_it_is_whatever_the_target_is_called_now(root, artifacts, asked_as):
    stored(root, "a", "shards/1.safetensors")
    captured(artifacts, "a", WEIGHTS)
    place = find_store(root, WEIGHTS, asked_as, artifacts)
    stored(root, WEIGHTS, "shards/2.safetensors")
    assert shards(place) == shards(root / "a") == {"1.safetensors", "2.safetensors"}


def test_what_an_interrupted_capture_left_is_found_without_a_record(root, artifacts):
    stored(root, "a", "shards/1.safetensors")
    assert shards(find_store(root, WEIGHTS, "a", artifacts)) == {"1.safetensors"}


def test_weights_that_come_later_get_a_store_of_their_own(root, artifacts):
    stored(root, "a", "shards/1.safetensors")
    find_store(root, WEIGHTS, "a", artifacts)
    assert shards(find_store(root, OTHERS, "a", artifacts)) == set()


def test_a_store_of_several_weights_is_found_by_each(root, artifacts):
    stored(root, "a", "shards/1.safetensors")
    for weights in (WEIGHTS, OTHERS):
        captured(artifacts, "a", weights)
    for weights in (WEIGHTS, OTHERS):
        assert shards(find_store(root, weights, "a", artifacts)) == {"1.safetensors"}


@pytest.mark.parametrize("folder", ["shards", "samples/abc"])
def test_two_named_stores_of_the_same_weights_become_one_and_stay_as_they_are(root, artifacts, folder):
    for name, file in (("a", "1"), ("copy", "2")):
        stored(root, name, f"{folder}/{file}.safetensors", "staging/x.tmp")
        captured(artifacts, name, WEIGHTS)
    place = find_store(root, WEIGHTS, "copy", artifacts)
    assert {path.name for path in (place / folder).iterdir()} == {"1.safetensors", "2.safetensors"}
    assert [path.name for path in (root / "copy" / folder).iterdir()] == ["2.safetensors"]
    (place / folder / "2.safetensors").unlink()  # damaged, say
    assert find_store(root, WEIGHTS, "copy", artifacts) == place
    assert not (place / folder / "2.safetensors").exists()


def test_a_join_that_was_cut_off_is_finished(root, artifacts, monkeypatch):
    stored(root, "a", "shards/1.safetensors")
    stored(root, "copy", *(f"shards/{number}.safetensors" for number in range(2, 6)))
    for name in ("a", "copy"):
        captured(artifacts, name, WEIGHTS)
    with monkeypatch.context() as patched:
        patched.setattr("draftworks.storage.legacy_stores._link", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            find_store(root, WEIGHTS, "a", artifacts)
    find_store(root, WEIGHTS, "copy", artifacts)
    assert len(shards(root / WEIGHTS)) == 5


def test_one_that_looks_while_another_joins_finds_the_files_of_all(root, artifacts, monkeypatch):
    for name, file in (("a", "1"), ("b", "2"), ("c", "3")):
        stored(root, name, f"shards/{file}.safetensors")
        captured(artifacts, name, WEIGHTS)
    join, seen = legacy_stores._join, []

    def look_then_join(named: Path, place: Path) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(legacy_stores, "_join", join)
            seen.append(len(shards(find_store(root, WEIGHTS, "a", artifacts))))
        join(named, place)

    monkeypatch.setattr(legacy_stores, "_join", look_then_join)
    assert len(shards(find_store(root, WEIGHTS, "b", artifacts))) == 3
    assert seen == [3] * len(seen) != []


def test_many_that_look_at_the_same_time_agree(root, artifacts):
    for name, file in (("a", "1"), ("b", "2"), ("c", "3")):
        stored(root, name, f"shards/{file}.safetensors")
        captured(artifacts, name, WEIGHTS)
    start, errors = threading.Barrier(8), []

    def look(name: str) -> None:
        start.wait()
        try:
            assert len(shards(find_store(root, WEIGHTS, name, artifacts))) == 3
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=look, args=("abc"[number % 3],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_answers_are_found_by_the_weights_that_gave_them(tmp_path):
    for name, weights in (("a/responses", WEIGHTS), ("copy/heldout_responses", WEIGHTS), ("b/responses", OTHERS)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.jsonl").write_text(json.dumps({"identity": {"target": weights}}) + "\n")
    (tmp_path / "a" / "responses" / "torn.jsonl").write_text('{"iden')
    (tmp_path / WEIGHTS).mkdir()
    found = [str(path.relative_to(tmp_path).parent) for path in find_answers(tmp_path, WEIGHTS)]
    assert found == ["a/responses", "copy/heldout_responses"]
