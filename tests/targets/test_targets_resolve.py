"""Targets on the hub, and what belongs to the identity of a target's answers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
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

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.storage.hub import fetch_hub_file
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import digest_target_files, require_unchanged, resolve_target

COMMIT = "a" * 40


def refusal(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    return kind("no", response=httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid")))


def resolved(registry: Path, **fields: str):
    spec = TargetSpec(name="mine", dataset="chats", max_length=256, strategies={"eagle3": {}}, **fields)
    return resolve_target(spec, Registry(registry), FileDigests())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal(GatedRepoError), "Accept its terms.*HF_TOKEN.*local directory"),
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
    with pytest.raises(ConfigError, match=f"target mine: some/model at commit {COMMIT[:12]}.*{message}"):
        resolved(tmp_path, model="some/model", revision=COMMIT)


def test_attempts_that_the_hubs_client_repeats_are_not_in_the_log(monkeypatch, caplog):
    def fail(*_: object, **__: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("unreachable")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(ConfigError, match="unreachable"):
        fetch_hub_file("target mine", "some/model", COMMIT, "config.json")
    assert "Retrying" not in caplog.text


def test_hub_out_of_reach_is_said_with_what_to_do(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=f"some/model at commit {COMMIT[:12]}: config.json is not in the cache.*network"
    ):
        resolved(tmp_path, model="some/model", revision=COMMIT)


def test_file_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert fetch_hub_file("target mine", "some/model", COMMIT, "config.json") == snapshot / "config.json"


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


def test_each_file_of_a_target_counts_in_the_digest_it_belongs_to(tmp_path: Path, tiny_folder: Path):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    before = resolved(tmp_path, model=str(model))
    counts = {
        "config.json": ("digest",),
        "model.safetensors": ("digest",),
        "generation_config.json": ("tokenizer_digest",),
        "tokenizer.json": ("tokenizer_digest",),
        "tokenizer_config.json": ("tokenizer_digest",),
        "chat_template.jinja": ("tokenizer_digest",),
        "README.md": (),
    }
    for name, expected in counts.items():
        kept = (model / name).read_bytes() if (model / name).exists() else b""
        (model / name).write_bytes(kept + b"\n")
        now = resolved(tmp_path, model=str(model))
        changed = [field for field in ("digest", "tokenizer_digest") if getattr(now, field) != getattr(before, field)]
        assert changed == list(expected), name
        (model / name).write_bytes(kept)
    template = tmp_path / "own.jinja"
    for text in ("{{ messages }}", "{{ messages }} "):
        template.write_text(text)
        now = resolved(tmp_path, model=str(model), chat_template=str(template))
        assert now.digest == before.digest
        assert now.tokenizer_digest != before.tokenizer_digest
        before = now


def test_a_target_that_changed_since_its_run_file_was_written_is_refused_by_name(tmp_path: Path, tiny_folder: Path):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    found = resolved(tmp_path, model=str(model))
    require_unchanged(found)
    for name, message in (
        ("config.json", "weights and config.json in"),
        ("generation_config.json", "tokenizer, template"),
    ):
        kept = (model / name).read_bytes()
        (model / name).write_bytes(kept + b"\n")
        with pytest.raises(ConfigError, match=f"target mine: {message}.*expected digest .*, found .*replaced later"):
            require_unchanged(found)
        (model / name).write_bytes(kept)
    with pytest.raises(ConfigError, match="expected digest ffff"):
        require_unchanged(found.model_copy(update={"digest": "ffff"}))
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json"):
        require_unchanged(found)


def test_a_target_that_is_as_it_was_is_not_read_again(tmp_path: Path, tiny_folder: Path, monkeypatch):
    spec = TargetSpec(name="mine", dataset="chats", max_length=256, strategies={"eagle3": {}}, model=str(tiny_folder))
    found = resolve_target(spec, Registry(tmp_path), FileDigests(tmp_path / "digests.json"))
    assert TargetFiles.model_validate_json(found.model_dump_json()) == found
    monkeypatch.setattr("draftworks.storage.identity.file_digest", lambda path: pytest.fail(f"{path} was read"))
    require_unchanged(found)


def test_a_target_of_the_hub_is_its_id_and_commit(tiny_folder: Path):
    hub = {"model": "some/model", "tokenizer": "some/model", "revision": COMMIT, "tokenizer_revision": COMMIT}
    shape = {"num_layers": 8, "hidden_size": 128, "vocab_size": 2048, "context": 512}
    target = digest_target_files(TargetFiles(name="mine", digest="", tokenizer_digest="", **hub, **shape))
    require_unchanged(target)
    with pytest.raises(ConfigError, match="target mine: weights"):
        require_unchanged(target.model_copy(update={"revision": "b" * 40}))


def test_a_wrapper_that_says_of_its_text_model_what_is_not_default_has_the_rest(
    tmp_path: Path, family_target: Callable[[str], TargetFiles]
):
    """Files as published for Gemma 3: config.json has neither the context length nor the number of heads."""
    made = family_target("gemma3")
    shutil.copytree(made.model, tmp_path / "sparse")
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    for name in ("max_position_embeddings", "num_attention_heads"):
        del config["text_config"][name]
    (tmp_path / "sparse" / "config.json").write_text(json.dumps(config))
    files = resolved(tmp_path, model="sparse")
    assert (files.context, files.num_heads) == (131072, 8)
    assert (files.num_layers, files.hidden_size, files.vocab_size) == (
        made.num_layers, made.hidden_size, made.vocab_size
    )  # fmt: skip


def test_what_not_even_a_default_says_is_missing_by_name(tmp_path: Path, tiny_folder: Path):
    shutil.copytree(tiny_folder, tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "nobody_knows", "hidden_size": 8}))
    with pytest.raises(ConfigError, match="expected an integer max_position_embeddings, found None"):
        resolved(tmp_path, model="odd")


ABSURD = {"num_hidden_layers": 10**9, "hidden_size": 0, "vocab_size": -1, "max_position_embeddings": True}


@pytest.mark.parametrize(("name", "value"), ABSURD.items())
def test_a_config_with_an_absurd_size_is_refused_before_anything_is_built(
    tmp_path: Path, tiny_folder: Path, name, value
):
    model = shutil.copytree(tiny_folder, tmp_path / "absurd")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ConfigError, match=rf"absurd/config\.json: expected .*{name}"):
        resolved(tmp_path, model=str(model))
