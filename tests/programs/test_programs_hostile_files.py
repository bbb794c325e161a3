"""Every kind of file that is read, altered at random, still gives the same content or one clear error that names it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from draft_run_files import RunFiles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftworks.config.draft_options import DraftConfig, read_draft_config
from draftworks.data.datasets import read_rows
from draftworks.data.tokenized import TokenizedSet
from draftworks.data.vocab import VocabMapping
from draftworks.errors import DraftworksError
from draftworks.export.canonical import read_checkpoint
from draftworks.features.manifest import read_feature_set
from draftworks.features.sample_folder import read_sample_header, write_sample
from draftworks.features.shards import read_header
from draftworks.storage.artifacts import ArtifactStore, BuildResult, FileRecord
from draftworks.targets.resolve import _read_model_config
from draftworks.training.checkpoint_files import read_record, write_record
from draftworks.training.history import History

FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
HOSTILE: list[Any] = [None, True, -1, 10**40, 1.5, "", "../../etc/passwd", "\x00", [], {}, [[]], {"a": {}}]


@dataclass(frozen=True)
class Kind:
    """An intact file, and the function that reads it."""

    path: Path
    read: Callable[[], Any]


def _rows(path: Path) -> Callable[[], Any]:
    return lambda: list(read_rows(path))


def _sample(folder: Path) -> Kind:
    path = folder / "sample.safetensors"
    write_sample(path, "s", {"last": torch.ones(2, 3)})

    def read() -> None:
        with path.open("rb") as stream:
            read_sample_header(stream, path)

    return Kind(path, read)


def _model_folder(folder: Path) -> dict[str, Kind]:
    folder.mkdir()
    config = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    return {
        "model_config": Kind(folder / "config.json", lambda: _read_model_config(str(folder), None, "target x")),
        "index": Kind(index, lambda: read_checkpoint(folder)),
        "indexed_weights": Kind(folder / "one.safetensors", lambda: read_checkpoint(folder)),
    }


def _data(folder: Path) -> dict[str, Kind]:
    row = {"conversations": [{"from": "human", "value": "é"}, {"from": "gpt", "value": "b"}]}
    jsonl, listed, parquet = (folder / f"data.{ending}" for ending in ("jsonl", "json", "parquet"))
    jsonl.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    listed.write_text(json.dumps([row, row]))
    pq.write_table(pa.Table.from_pylist([row, row]), parquet)
    return {path.suffix: Kind(path, _rows(path)) for path in (jsonl, listed, parquet)}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory, tiny_target) -> dict[str, Kind]:
    folder = tmp_path_factory.mktemp("sound")
    files = RunFiles.make(folder, tiny_target)
    (shard,) = list((folder / "store" / "shards").iterdir())[:1]
    checkpoint = folder / "step"
    checkpoint.mkdir()
    save_file({"a": torch.ones(2)}, checkpoint / "model.safetensors")
    size = (checkpoint / "model.safetensors").stat().st_size
    write_record(checkpoint, "run", 3, 1, 0.0, {"window": {}}, {"model.safetensors": FileRecord(size, "0")})
    History(5).save(folder / "history.json")
    artifacts = ArtifactStore(folder / "var")
    made = artifacts.obtain("asset", "target", {"a": 1}, lambda out: BuildResult("v", {}))
    config = DraftConfig("eagle3", {"layer_ids": [1]}, "0", "0")
    (folder / "draft" / "config.json").write_text(json.dumps(asdict(config)))
    train = files.train_run().train
    return {
        "shard": Kind(shard, lambda: read_header(shard)),
        "manifest": Kind(train.features / "manifest.json", lambda: read_feature_set(train.features)),
        "refs": Kind(train.features / "refs.jsonl", lambda: read_feature_set(train.features)),
        "tokens_summary": Kind(train.tokens / "summary.json", lambda: TokenizedSet.open(train.tokens)),
        "tokens": Kind(train.tokens / "tokens.parquet", lambda: TokenizedSet.open(train.tokens)),
        "vocab": Kind(folder / "vocab.safetensors", lambda: VocabMapping.load(folder / "vocab.safetensors")),
        "checkpoint": Kind(checkpoint / "checkpoint.json", lambda: read_record(checkpoint)),
        "history": Kind(folder / "history.json", lambda: History.load(folder / "history.json")),
        "artifact": Kind(made.path / "artifact.json", lambda: artifacts.load_current("asset", "target")),
        "pointer": Kind(made.path.parent / "current.json", lambda: artifacts.load_current("asset", "target")),
        "draft_config": Kind(folder / "draft" / "config.json", lambda: read_draft_config(folder / "draft")),
        "sample": _sample(folder),
        **_model_folder(folder / "model"),
        **_data(folder),
    }


NAMES = [
    "shard", "manifest", "refs", "tokens_summary", "tokens", "vocab", "checkpoint", "history", "artifact", "pointer",
    "draft_config", "sample", "model_config", "index", "indexed_weights", ".jsonl", ".json", ".parquet",
]  # fmt: skip


@st.composite
def altered(draw: st.DrawFn, sound: bytes) -> bytes:
    """Alter bytes: cut off, overwrite, lengthen, replace all, or replace one value in JSON."""
    way = draw(st.sampled_from(["cut", "overwrite", "insert", "any", "deep", "value", "value", "value"]))
    place = draw(st.integers(0, len(sound)))
    noise = draw(st.binary(min_size=1, max_size=12))
    if way == "cut":
        return sound[:place]
    if way == "overwrite":
        return sound[:place] + noise + sound[place + len(noise) :]
    if way == "insert":
        return sound[:place] + noise + sound[place:]
    if way == "deep":
        return b"[" * 100_000
    if way == "value":
        try:
            document = json.loads(sound.partition(b"\n")[0] if draw(st.booleans()) else sound)
        except ValueError:
            return noise
        return json.dumps(_with_one_replaced(draw, document)).encode()
    return noise


def _with_one_replaced(draw: st.DrawFn, value: Any) -> Any:
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(HOSTILE))
    at = draw(st.sampled_from(list(inner)))
    copy = dict(value) if isinstance(value, dict) else list(value)
    if isinstance(copy, dict) and draw(st.integers(0, 4)) == 0:
        del copy[at]
    else:
        copy[at] = _with_one_replaced(draw, value[at])
    return copy


@pytest.mark.parametrize("name", NAMES)
def test_an_altered_file_is_sound_or_one_clear_error(name: str, kinds: dict[str, Kind]):
    kind = kinds[name]
    sound = kind.path.read_bytes()

    @FEW
    @given(st.data())
    def check(data: st.DataObject) -> None:
        kind.path.write_bytes(data.draw(altered(sound)))
        with suppress(DraftworksError):
            kind.read()

    try:
        check()
    finally:
        kind.path.write_bytes(sound)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"sample"}))
def test_a_pipe_in_place_of_a_file_is_one_clear_error_at_once(name: str, kinds: dict[str, Kind]):
    kind = kinds[name]
    sound = kind.path.read_bytes()
    kind.path.unlink()
    os.mkfifo(kind.path)
    try:
        with pytest.raises(DraftworksError, match="expected a file, found a pipe"):
            kind.read()
    finally:
        kind.path.unlink()
        kind.path.write_bytes(sound)


def test_every_sound_file_is_read(kinds: dict[str, Kind]):
    assert set(kinds) == set(NAMES)
    for kind in kinds.values():
        kind.read()
