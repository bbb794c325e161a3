"""Targets on the hub, and what belongs to the identity of a target's answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftworks.errors import ConfigError
from draftworks.hub import hub_file
from draftworks.identity import FileDigests
from draftworks.registry import Registry
from draftworks.resolve import resolve_target
from draftworks.specs import TargetSpec

COMMIT = "a" * 40


def refusal(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    return kind("no", response=httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid")))


def resolved(registry: Path, **fields: str):
    spec = TargetSpec(name="mine", dataset="chats", max_length=256, strategies={"eagle3": {}}, **fields)
    return resolve_target(spec, Registry(registry), FileDigests())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal(GatedRepoError), "terms to be accepted.*HF_TOKEN.*local directory"),
        (refusal(RepositoryNotFoundError), "no such model, or it is private.*HF_TOKEN.*local directory"),
        (HFValidationError("bad id"), "no such model"),
        (refusal(RevisionNotFoundError), "no such commit. Correct the revision"),
        (refusal(HfHubHTTPError), "config.json cannot be fetched: HfHubHTTPError: no.*Check the network"),
        (OSError("disk full"), "config.json cannot be fetched: OSError: disk full"),
        (refusal(RemoteEntryNotFoundError), "has no config.json"),
    ],
)
def test_what_the_hub_refuses_is_said_with_target_id_and_commit(tmp_path: Path, monkeypatch, error, message: str):
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ConfigError, match=f"target mine: some/model at commit {COMMIT}.*{message}"):
        resolved(tmp_path, model="some/model", revision=COMMIT)


def test_hub_out_of_reach_is_said_with_what_to_do(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=f"some/model at commit {COMMIT}: config.json is not in the cache.*network"):
        resolved(tmp_path, model="some/model", revision=COMMIT)


def test_file_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert hub_file("target mine", "some/model", COMMIT, "config.json") == snapshot / "config.json"


def test_what_ends_an_answer_is_part_of_the_tokenizers_digest(tmp_path: Path, tiny_folder: Path):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    before = resolved(tmp_path, model=str(model))
    ends = model / "generation_config.json"
    ends.write_text(ends.read_text().replace("{", '{"max_length": 77,', 1))
    changed = resolved(tmp_path, model=str(model))
    ends.unlink()
    absent = resolved(tmp_path, model=str(model))
    assert len({each.tokenizer_digest for each in (before, changed, absent)}) == 3
    assert before.digest == changed.digest == absent.digest


def test_config_that_is_no_object_is_refused(tmp_path: Path, tiny_folder: Path):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    (model / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config.json: expected a JSON object"):
        resolved(tmp_path, model=str(model))
