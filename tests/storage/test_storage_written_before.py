"""Folders that version 0.1.0 wrote are read, verified and written again, byte for byte: `written_before/`.

They were made before artifacts, caches, checkpoints and reports had their storage in common.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from eval_cache_producer import CONFIG, inputs_of, writer
from report_toys import full_report

from draftworks.config.decoding import Decoding
from draftworks.data.conversations import Turn, read_conversations
from draftworks.errors import StoreError
from draftworks.evaluation.eval_cache import EvalCache
from draftworks.evaluation.ladder.loop import LoopCache, LoopIdentity
from draftworks.evaluation.measurement_cache import MeasurementEntry
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import read_report, require_prompts_file
from draftworks.evaluation.report.writing import save_report
from draftworks.storage.artifacts import ArtifactStore, BuildResult, list_files
from draftworks.training.checkpoint_files import CheckpointFolder, read_record, sync_and_checksum, verify, write_record

BEFORE = Path(__file__).with_name("written_before")
CREATED = 1.0e9


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return shutil.copytree(BEFORE, tmp_path / "before")


def build(folder: Path) -> BuildResult:
    for name, text in {"deep/er/data.txt": "ä\n", "plain.json": "{}\n", "checkpoints/large.txt": "large\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return BuildResult("version", {"figure": 1.5}, own_digests=("checkpoints",))


def never(folder: Path) -> BuildResult:
    raise AssertionError(f"{folder} is made although it is there")


def write_checkpoint(output: Path) -> CheckpointFolder:
    folder = CheckpointFolder(output, "run")
    staging = folder.staging(2)
    for name, text in {"model.txt": "weights\n", "rng/rank0.txt": "generator\n", "empty.txt": ""}.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text(text)
    state = {"position": {"step": 2}, "identity": {"options": {"taps": [1, 2]}}}
    write_record(staging, "run", 2, 2, CREATED, state, sync_and_checksum(staging, list_files(staging)))
    folder.publish(2)
    folder.point_to(folder.latest_pointer, 2)
    return folder


def check_artifact(root: Path) -> None:
    assert ArtifactStore(root / "artifacts").obtain("thing", "tiny", {"a": 1}, never).hit


def check_eval_cache(root: Path) -> None:
    assert EvalCache(root).get_or_produce(CONFIG, never, inputs_of(0), rebuild=False).hit


def check_checkpoint(root: Path) -> None:
    folder = root / "checkpoints" / "run-step2"
    record = read_record(folder)
    verify(folder, record, record.files)


def check_report(root: Path) -> None:
    require_prompts_file(root / "report")


def check_conversations(root: Path) -> None:
    assert [each.turns for each in read_conversations(root / "conversations")] == [
        (Turn("user", "a"), Turn("assistant", "b"))
    ]


class Kept(NamedTuple):
    """One kind of folder: its check, and a file of it whose damage the check has to find."""

    check: Callable[[Path], None]
    file: str


KINDS = {
    "artifact": Kept(check_artifact, "artifacts/thing/tiny/*/deep/er/data.txt"),
    "eval cache": Kept(check_eval_cache, "eval_cache/*/deep/rows.txt"),
    "checkpoint": Kept(check_checkpoint, "checkpoints/run-step2/rng/rank0.txt"),
    "report": Kept(check_report, "report/prompts.parquet"),
    "conversations": Kept(check_conversations, "conversations/conversations.parquet"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_before_is_whole_and_a_flipped_bit_in_it_is_found(kind: str, before: Path) -> None:
    KINDS[kind].check(before)
    (path,) = before.glob(KINDS[kind].file)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises((StoreError, AssertionError), match=path.name if kind != "artifact" else "is made"):
        KINDS[kind].check(before)


def test_a_loop_that_was_kept_before_is_found_under_its_key(before: Path) -> None:
    (path,) = (before / "loop_cache").glob("*.json")
    recorded = MeasurementEntry.model_validate_json(path.read_text()).identity
    recorded["decoding"] = Decoding.from_json({"temperature": recorded.pop("temperature")})
    identity = LoopIdentity(**{**recorded, "stop_ids": tuple(recorded["stop_ids"])})
    cache = LoopCache.open(before / "loop_cache")
    found = cache.find(identity)
    assert (found.problem, cache.path(identity)) == (None, path)
    content = path.read_bytes()
    assert cache.store(identity, found.measurement).read_bytes() == content


def test_a_report_that_was_saved_before_is_read_whole(before: Path, tmp_path: Path) -> None:
    save_report(full_report(), tmp_path / "now")
    then, now = (Report.load(folder) for folder in (before / "report", tmp_path / "now"))
    assert then.drafts.keys() == now.drafts.keys()
    for name, draft in then.drafts.items():
        assert (draft.blocks, draft.walk) == (now.drafts[name].blocks, now.drafts[name].walk)
        assert [loop.prompts for loop in draft.loops] == [loop.prompts for loop in now.drafts[name].loops]
    files = [read_report(folder)["files"] for folder in (before / "report", tmp_path / "now")]
    assert [*files[0]] == [*files[1]]


def test_the_same_written_now_is_the_same_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: CREATED)
    ArtifactStore(tmp_path / "artifacts").obtain("thing", "tiny", {"a": 1}, build)
    EvalCache(tmp_path).get_or_produce(CONFIG, writer(0), inputs_of(0))
    write_checkpoint(tmp_path / "checkpoints")
    for folder in ("artifacts", "eval_cache", "checkpoints"):
        names = [name for name in list_files(tmp_path / folder) if ".lock/" not in name]
        assert names == list_files(BEFORE / folder)
        for name in names:
            assert (tmp_path / folder / name).read_bytes() == (BEFORE / folder / name).read_bytes(), name
