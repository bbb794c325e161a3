"""Targets on the hub, and what belongs to the identity of a target's answers.
What a machine computes with is read from its files, and agrees with what PyTorch says of this one.
Which strategies the entries of a registry use, whatever else their text mentions.
The data that is trained on has an identity of its content: shares of slices are part of it, where there are some.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftworks.config.registry_files import EvalSpec, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.storage.hub import fetch_hub_file
from draftworks.storage.identity import FileDigests
from draftworks.targets.fitted_defaults import Machine, read_machine
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import digest_target_files, require_unchanged, resolve_target
from draftworks.targets.training_data import digest_training_data, identify_eval_set, list_used_strategies

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


def test_a_folder_without_a_config_is_told_once_and_an_adapter_by_name(tmp_path: Path, tiny_folder: Path):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json: no such file; expected a Hugging Face model$"):
        resolved(tmp_path, model=str(model))
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json: no such file; it is an adapter: merge it into its model$"):
        resolved(tmp_path, model=str(model))
    with pytest.raises(ValueError, match="at least 1 character"):
        resolved(tmp_path, model="")


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


PROCESSOR_FILES = {
    "AVX2": ("processor\t: 0\nvendor_id\t: x\nflags\t\t: fpu sse4_2 avx avx2 fma\n", False),
    "AVX512 without BF16": ("flags\t\t: avx2 avx512f avx512vl avx512_vnni\n", False),
    "AVX512-BF16": ("flags\t\t: avx2 avx512f avx512_bf16\n", True),
    "AMX": ("flags\t\t: avx2 avx512f amx_bf16 amx_tile amx_int8\n", True),
    "Arm": ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
    "older Arm": ("Features\t: fp asimd crc32\n", False),
    "of no known kind": ("cpu\t: POWER9\n", False),
}


@pytest.mark.parametrize(("text", "bfloat16"), PROCESSOR_FILES.values(), ids=PROCESSOR_FILES)
def test_bfloat16_is_an_ability_of_the_processor(tmp_path: Path, text: str, bfloat16: bool):
    processors = tmp_path / "cpuinfo"
    assert not read_machine(tmp_path, processors).bfloat16  # without the file
    processors = tmp_path / "named"
    processors.write_text(text)
    assert read_machine(tmp_path, processors).bfloat16 == bfloat16


def test_this_machine_is_as_pytorch_sees_it():
    """Where it can be asked: of Arm it says nothing."""
    wide = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert read_machine().bfloat16 == wide or platform.machine() != "x86_64"


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), False), (("nvidia0", "nvidiactl"), True), (("nvidiactl",), False), (("kfd",), True)],
)
def test_auto_is_a_gpu_where_pytorch_can_use_one(tmp_path: Path, names: tuple[str, ...], expected: bool, monkeypatch):
    for name in names:
        (tmp_path / name).touch()
    for version, usable in (("2.13.0+cu130", True), ("2.13.0", True), ("2.13.0+cpu", False)):
        monkeypatch.setattr("draftworks.targets.fitted_defaults.read_version", lambda package, found=version: found)
        assert read_machine(tmp_path).uses_gpu == (expected and usable)


def test_gpus_are_counted(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidia-uvm", "nvidia10"):
        (tmp_path / name).touch()
    assert read_machine(tmp_path, tmp_path / "none") == Machine(3, False, False, read_machine().cpu_only)


ENTRY = "model: m\ndataset: d\n"


class CountingRegistry(Registry):
    """Registry that notes which entries are parsed."""

    parsed: list[str]

    def load_target(self, name: str) -> TargetSpec:
        self.__dict__.setdefault("parsed", []).append(name)
        return super().load_target(name)


@pytest.fixture
def registry(tmp_path: Path) -> CountingRegistry:
    (tmp_path / "targets").mkdir()
    return CountingRegistry(tmp_path)


def write(registry: Registry, **entries: str) -> None:
    for name, text in entries.items():
        (registry.root / "targets" / f"{name}.yaml").write_text(text)


@pytest.mark.parametrize(
    ("text", "used"),
    [
        (ENTRY, ["eagle3"]),
        (ENTRY + "# strategies: of the default\n", ["eagle3"]),
        (ENTRY + "strategies: {}\n", []),
        (ENTRY + "strategies: {dflash2: {}}\n", ["dflash2"]),
        (ENTRY + "# or eagle3, and mtp\nstrategies:\n  dflash: {}\n", ["dflash"]),
        (ENTRY + "'strategies':\n  ? domino\n  : {}\n", ["domino"]),
        ("{model: m, dataset: d, strategies: {peagle: {}}}", ["peagle"]),
        ("model: eagle3/mtp\ndataset: d\nstrategies: {xpress: {}}\n", ["xpress"]),
        (ENTRY + "max_lenght: 3\nstrategies: {dspark: {}, domino: {}}\n", ["domino", "dspark"]),
        (ENTRY + "max_lenght: 3\n", ["eagle3"]),
        (ENTRY + "strategies: {dspark: [}\n", ["dspark"]),
        (ENTRY + "strategies: {eagle: {}}\n", []),
        ("\xff\xfe", ["eagle3"]),
    ],
)
def test_an_entry_uses_what_it_names_and_one_with_a_mistake_all_that_it_mentions(registry, text, used):
    write(registry, one=text)
    assert list_used_strategies(registry) == used


def test_what_any_entry_uses_is_used(registry):
    write(registry, a=ENTRY, b=ENTRY + "strategies: {mtp: {}}\n", c=ENTRY + "strategies: {mtp: {}, dflash: {}}\n")
    assert list_used_strategies(registry) == ["dflash", "eagle3", "mtp"]


def test_a_registry_without_entries_uses_none(registry):
    assert list_used_strategies(registry) == []


def test_what_is_no_file_uses_what_an_empty_entry_would(registry):
    (registry.root / "targets" / "folder.yaml").mkdir()
    assert list_used_strategies(registry) == ["eagle3"]


def test_only_an_entry_that_may_name_another_strategy_is_parsed(registry):
    write(registry, **{f"t{number}": ENTRY + "strategies: {eagle3: {}, mtp: {}}\n" for number in range(20)})
    write(registry, u=ENTRY + "strategies: {dflash: {}}\n", v=ENTRY)
    list_used_strategies(registry)
    assert registry.parsed == ["t0", "u"]


CHATS_ENTRY = {"model": "models/tiny", "dataset": "chats"}


def make_registry(root: Path) -> Registry:
    for folder in ("targets", "datasets"):
        (root / folder).mkdir()
    (root / "chats.jsonl").write_text('{"messages": []}\n')
    (root / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    return Registry(root)


def test_shares_are_part_of_the_data_and_their_order_is_not(tmp_path: Path):
    registry, found = make_registry(tmp_path), {}
    mixes = {
        "none": {},
        "half": {"shares": {"thinking": {"on": 0.5, "off": 0.5}}},
        "half again": {"shares": {"thinking": {"off": 0.5, "on": 0.5}}},
        "less": {"shares": {"thinking": {"on": 0.25, "off": 0.75}}},
    }
    for name, mix in mixes.items():
        (tmp_path / "targets" / "t.yaml").write_text(yaml.safe_dump({**CHATS_ENTRY, "mix": mix}))
        target = registry.load_target("t")
        digests = FileDigests()
        of_evals = identify_eval_set(target, EvalSpec(name="e", dataset="chats"), "d", 9).to_json()
        assert of_evals.get("both_ways") == (True if "shares" in mix else None)
        assert ("both_ways" in of_evals) == ("shares" in mix)
        found[name] = digest_training_data(target, registry, digests)
    assert found["half"] == found["half again"]
    assert len(set(found.values())) == 3
