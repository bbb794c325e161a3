"""The examination reports what would fail after expensive work, and what deserves a warning."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftworks.config.registry_files import TargetSpec
from draftworks.drafts import target_parts
from draftworks.preflight import sample_rows
from draftworks.preflight.examine import examine_entry
from draftworks.preflight.findings import Finding, Findings
from draftworks.preflight.plausible_values import check_values
from draftworks.programs.cli import app
from draftworks.storage.identity import FileDigests


def strategy(name: str, training: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    reduced = {"draft_vocab_size": 64} if name in ("eagle3", "peagle") else {}
    return {name: {"options": {**reduced, **options}, "training": training or {}}}


def test_a_sound_target_has_no_findings(fleet):
    found = fleet.check()
    assert (found.errors, found.warnings) == ([], [])


ENTRIES = {
    "learning rate": ({"strategies": strategy("eagle3", {"lr": 100})}, "training.lr: found 100"),
    "decay": ({"strategies": strategy("eagle3", {"lr": 0.1, "weight_decay": 20})}, "remove all weights in one step"),
    "more tokens than a block has": (
        {"strategies": strategy("dflash", mask_token_id=3, block_size=4), "evaluation": {"draft_tokens": 9}},
        "evaluation.draft_tokens: found 9; its drafts propose: dflash at most 3",
    ),
    "mask that text uses": ({"strategies": strategy("dflash", mask_token_id=300)}, "mask_token_id: 300 is"),
    "special mask that the template prints": (
        {"strategies": strategy("peagle", mask_token_id=1)},
        "mask_token_id: 1 is 60 times in the sample",
    ),
    "revision of a folder": ({"revision": "0" * 40}, "is a directory: leave `revision` out"),
    "unknown eval set": ({"evals": ["nosuch"]}, "evals: no file evals/nosuch.yaml; there are: none"),
    "unknown data set": ({"dataset": "chat"}, "did you mean chats?"),
    "heads that do not divide": ({"strategies": strategy("eagle3", num_heads=3)}, "num_heads 3 does not divide"),
    "kv heads that do not group": ({"strategies": strategy("eagle3", num_heads=4, num_kv_heads=3)}, "multiple of"),
    "kv heads of more than the target's": (
        {"strategies": strategy("eagle3", num_kv_heads=64)},
        "num_heads 4 is not a multiple of num_kv_heads 64",
    ),
    "weights that are not written yet": (
        {"mix": {"weights": "weights/small.json"}, "data": {"max_conversations": 9}},
        "weights/small.json. Write it with: draftworks slices small eagle3 --save FILE",
    ),
    "no room for answers": ({"max_length": 8, "strategies": strategy("eagle3", ttt_length=2)}, "leave no room"),
    "thinking without a switch": ({"responses": {"thinking": True}}, "no switch for thinking"),
    "SGLang without its environment": ({"capture": {"backend": "sglang"}}, "needs SGLang, and"),
}


@pytest.mark.parametrize(("entry", "message"), ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_would_fail_is_an_error(fleet, entry, message):
    fleet.write(**entry)
    assert any(message in error for error in fleet.check().errors), fleet.check()


WARNINGS = {
    "learning rate": ({"strategies": strategy("eagle3", {"lr": 0.5})}, "training.lr: found 0.5"),
    "more tokens than one of the drafts proposes": (
        {"strategies": strategy("dflash", mask_token_id=3) | strategy("eagle3"), "evaluation": {"draft_tokens": 20}},
        "measured with what they can propose",
    ),
    "default mask of ordinary text": ({"strategies": strategy("dflash")}, "and the default: the last id"),
    "answers as long as samples": ({"responses": {"max_new_tokens": 96}}, "leaves no room for its prompt"),
    "cut": (
        {"max_length": 20, "responses": {"mode": "passthrough"}, "strategies": strategy("eagle3", ttt_length=2)},
        "max_length 20 cuts 19 of the 26 rows to train on",
    ),
    "gate of fewer samples than a batch": (
        {"capture": {"storage": "fp8"}, "gates": {"fp8_samples": 4}},
        "gates.fp8_samples: found 4, fewer than the global_batch_size 8 of eagle3",
    ),
    "acting without a budget": (
        {"service": {"least_prompts": 1}, "decision": {"act": "tune"}},
        "decision.act is tune, and deployment.yaml has no budget",
    ),
    "many ranks": ({"capture": {"device": "cpu", "processes": 5000}}, "processes: found 5000"),
    "key of a server": (
        {
            "responses": {
                "endpoint": {"base_urls": ["http://h/v1"], "server": "vllm", "api_key_env": "NO_SUCH_KEY_HERE"}
            }
        },
        "the environment has no NO_SUCH_KEY_HERE",
    ),
}


@pytest.mark.parametrize(("entry", "message"), WARNINGS.values(), ids=WARNINGS)
def test_what_is_odd_is_a_warning_and_no_error(fleet, entry, message):
    fleet.write(**entry)
    found = fleet.check()
    assert found.errors == []
    assert any(message in warning for warning in found.warnings), found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": {"on": 1, "off": 0}}, "the share of off is 0"),
        ({"tokens": 9}, "comparison.tokens: found 9"),
        ({}, None),
    ],
)
def test_a_comparison_of_thinking_that_has_nothing_to_compare_is_a_warning(options, message):
    shares = options.get("shares", {"on": 0.5, "off": 0.5})
    entry = {"mix": {"shares": {"thinking": shares}}, "comparison": {"tokens": options.get("tokens", 10**6)}}
    findings = Findings()
    check_values(TargetSpec.model_validate({"name": "t", "model": "m", "dataset": "d", **entry}), findings)
    assert findings.errors == []
    assert [message in one.text for one in findings.found] == ([] if message is None else [True])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("nothing/*.jsonl", "matches no file"),
        ("chats.csv", "expected one of .jsonl"),
        ("chats.parquet", "not a readable Parquet"),
    ],
)
def test_data_files_that_cannot_be_read_are_errors(fleet, files, message):
    (fleet.root / "registry" / "chats.csv").write_text("a,b\n1,2\n")
    (fleet.root / "registry" / "chats.parquet").write_text("no parquet")
    (fleet.root / "registry" / "datasets" / "chats.yaml").write_text(f"files: ['{files}']\n")
    assert any(message in error for error in fleet.check().errors), fleet.check()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there is no row"),
        ([{"messages": [{"role": "system", "content": "hi"}]}] * 3, "none of its first 3 rows can be used"),
        (
            [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}] * 3,
            "tokenized already, so its answers cannot be regenerated",
        ),
    ],
)
def test_data_that_gives_nothing_is_an_error(fleet, rows, message):
    fleet.write_rows(rows)
    assert any(message in error for error in fleet.check().errors), fleet.check()


@pytest.mark.parametrize("text", [json.dumps, lambda rows: "\n".join(map(json.dumps, rows))], ids=["list", "lines"])
def test_a_json_list_too_large_to_be_looked_at_is_no_error(fleet, text, monkeypatch):
    rows = [json.loads(line) for line in fleet.chats.read_text().splitlines()]
    (fleet.root / "registry" / "chats.json").write_text(text(rows))
    (fleet.root / "registry" / "datasets" / "chats.yaml").write_text("files: [chats.json]\n")
    monkeypatch.setattr(sample_rows, "MAX_JSON_LIST_BYTES", 1 << 10)
    found = fleet.check()
    assert found.errors == []
    assert [
        warning for warning in found.warnings if "chats.json: not looked at, as a JSON list of more than" in warning
    ] == (found.warnings if text is json.dumps else [])


@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_stop_the_run_are_an_error_where_all_are_known_and_else_a_warning(fleet, whole: bool):
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    fleet.write_rows([good, {"messages": []}, good, {"nothing": 1}] + ([] if whole else [good] * 80))
    found = fleet.check()
    if whole:
        assert any("2 of its 4 rows cannot be used" in error for error in found.errors)
    else:
        assert found.errors == []
    fleet.write_rows(([good, {"messages": []}] * 2) + ([] if whole else [good, {"nothing": 1}] * 40))
    found = fleet.check()
    rows = "2 of its 4 rows" if whole else "32 of its first 64 rows"
    told = found.errors if whole else found.warnings
    assert any(f"{rows} cannot be used" in each for each in told)
    assert whole or found.errors == []


def test_a_template_that_refuses_every_conversation_is_an_error(fleet):
    (fleet.root / "registry" / "t.jinja").write_text("{{ raise_exception('not like this') }}")
    fleet.write(chat_template="t.jinja")
    assert any("not like this" in error for error in fleet.check().errors)


def test_a_mask_is_any_token_of_the_sample(fleet):
    """A special token that occurs in the data is an error too, since the data has it."""
    fleet.write_rows(
        [{"messages": [{"role": "user", "content": "a <|mask|>"}, {"role": "assistant", "content": "b"}]}] * 9
    )
    fleet.write(strategies=strategy("dflash", mask_token_id=3))
    assert any("mask_token_id: 3 is 9 times in the sample of the data" in error for error in fleet.check().errors)


def test_weights_that_are_not_whole_are_an_error(fleet):
    weights = fleet.own_model() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert any("model.safetensors" in error for error in fleet.check().errors), fleet.check()


def test_an_embedding_under_another_name_is_an_error(fleet):
    """As in GPT-NeoX: transformers loads the target, and no draft can read its embedding."""
    weights = fleet.own_model() / "model.safetensors"
    held = {name.replace("embed_tokens", "embed_in"): tensor for name, tensor in load_file(weights).items()}
    save_file(held, weights, metadata={"format": "pt"})
    assert any("expected one tensor '*.embed_tokens.weight', found none" in error for error in fleet.check().errors)


def test_a_head_with_a_bias_is_a_warning(fleet):
    weights = fleet.own_model() / "model.safetensors"
    held = load_file(weights)
    save_file({**held, "lm_head.bias": torch.ones(2048)}, weights, metadata={"format": "pt"})
    assert any("adds lm_head.bias to its logits" in warning for warning in fleet.check().warnings)


def test_folders_that_cannot_be_written_are_errors(fleet):
    deployment = fleet.root / "registry" / "deployment.yaml"
    deployment.write_text("var: ../file/var\nfeatures: {kind: shared_dir, root: ../nowhere}\n")
    (fleet.root / "file").touch()
    errors = fleet.check().errors
    assert any("var: " in error and "is not a folder" in error for error in errors)
    assert any("features.root: " in error and "mount it" in error for error in errors)


def test_object_storage_without_keys_is_an_error(fleet, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    deployment = fleet.root / "registry" / "deployment.yaml"
    deployment.write_text(
        "features: {kind: s3, url: 's3://drafts/features'}\npublish: {url: 's3://drafts/published'}\n"
        "object_storage: {endpoint: 'http://127.0.0.1:9', access_key_env: NOT_SET}\n"
    )
    errors = fleet.check().errors
    for key in ("features.url: s3://drafts/features", "publish.url: s3://drafts/published"):
        assert any(f"deployment: {key}: the environment has no NOT_SET" in error for error in errors)


def test_no_weights_are_read_and_nothing_is_allocated(fleet, monkeypatch):
    read, made = [], []
    monkeypatch.setattr(target_parts, "_open", lambda path: read.append(path))
    plain = torch.nn.Module.__init__

    def watched(self, *args, **kwargs):
        made.append(self)
        plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__init__", watched)
    fleet.write(
        strategies={
            k: v for n in ("eagle3", "dflash", "domino", "dspark", "lilicorr", "peagle") for k, v in strategy(n).items()
        }
    )
    assert fleet.check().errors == []
    devices = {parameter.device.type for module in made for parameter in module.parameters()}
    assert made
    assert (read, devices) == ([], {"meta"})


def test_a_target_on_a_hub_that_cannot_be_reached_is_a_warning(fleet, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fleet.write(model="nobody/has-this", revision="1" * 40)
    found = fleet.check()
    assert found.errors == []
    assert any("cannot be reached" in warning and "Nothing of it was checked" in warning for warning in found.warnings)


def run(fleet, *arguments: str):
    return CliRunner().invoke(app, ["check", "--registry", str(fleet.registry.root), *arguments])


def test_the_command_tells_a_line_for_each_target_and_its_exit_code_says_whether_one_would_fail(fleet):
    good = run(fleet)
    assert good.exit_code == 0
    assert "small: ok" in good.output.splitlines()
    targets = fleet.registry.root / "targets"
    (targets / "broken.yaml").write_text("model: a\nmodel: b\n")
    (targets / "other.yml").write_text("model: a\n")
    bad = run(fleet)
    assert bad.exit_code == 1
    assert "small: ok" in bad.output.splitlines()
    assert "broken: 1 problem" in bad.output.splitlines()
    assert [line for line in bad.output.splitlines() if line.startswith("  error: ") and "given twice" in line]
    assert [
        line for line in bad.output.splitlines() if line.startswith("error: ") and "rename it to other.yaml" in line
    ]
    (targets / "other.yml").unlink()
    assert run(fleet, "--target", "small").exit_code == 0
    assert run(fleet, "--target", "smal").exit_code == 1
    told = json.loads(run(fleet, "--json").stdout)
    assert told["targets"]["small"] == {"errors": [], "warnings": [], "notes": []}
    assert len(told["targets"]["broken"]["errors"]) == 1


@pytest.mark.parametrize(
    ("path", "entry", "message"),
    [
        (
            "datasets/chats.yaml",
            "files: [chats.jsonl]\nformat: served\nserved: {redaction: {function: 'no_such_module:f'}}\n",
            "no_such_module",
        ),
        ("deployment.yaml", "var: 3\n", "deployment.yaml: var"),
    ],
)
def test_one_bad_file_keeps_no_target_from_being_examined(fleet, path, entry, message):
    targets = fleet.registry.root / "targets"
    (targets / "wrong.yaml").write_text(
        (targets / "small.yaml").read_text() + "evaluation: {loop: {temperatures: [9]}}\n"
    )
    (fleet.registry.root / path).write_text(entry)
    told = run(fleet)
    assert told.exit_code == 1
    assert isinstance(told.exception, SystemExit)
    assert [line for line in told.output.splitlines() if message in line]
    assert [line for line in told.output.splitlines() if "evaluation.loop.temperatures: found [9.0]" in line]


def test_the_command_asks_schedulers_and_object_storage(fleet, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "toy")
    (fleet.registry.root / "deployment.yaml").write_text(
        "launcher: {programs: {train: {kind: slurm, commands: /nowhere}}}\npublish: {url: 's3://drafts/published'}\n"
        "object_storage: {endpoint: 'http://127.0.0.1:9', retry_s: 0}\n"
    )
    told = json.loads(run(fleet, "--json").stdout)
    assert any("publish.url: s3://drafts/published" in problem for problem in told["problems"])
    (error,) = told["targets"]["small"]["errors"]
    assert error.startswith("target small: jobs of train: launcher of kind slurm: no command sbatch in")


def test_a_registry_without_a_target_is_not_in_order(fleet):
    (fleet.registry.root / "targets" / "small.yaml").rename(fleet.registry.root / "targets" / "small.yml")
    found = run(fleet)
    assert found.exit_code == 1
    assert "rename it to small.yaml" in found.output


def test_what_is_known_of_the_same_content_is_not_found_out_again(fleet, tmp_path, monkeypatch):
    def examine() -> tuple[Finding, ...]:
        return examine_entry("small", fleet.registry, FileDigests(), tmp_path / "var")

    first, looked = examine(), []
    monkeypatch.setattr("draftworks.preflight.drafts.check_drafts", lambda *_: looked.append("drafts"))
    monkeypatch.setattr("draftworks.targets.weights._check", lambda *_: looked.append("weights"))
    assert examine() == first
    assert not looked
    fleet.write(max_length=95)
    examine()
    assert looked == ["drafts"]


def test_entries_that_cannot_be_read_need_no_torch(fleet):
    """In a process of its own, since this one has imported the libraries already."""
    import subprocess

    (fleet.registry.root / "targets" / "small.yaml").write_text("[" * 50_000)
    code = (
        "import sys; from pathlib import Path; from draftworks.storage.identity import FileDigests; from draftworks.targets.registry import Registry\n"
        "from draftworks.preflight.examine import examine_entry\n"
        "found = examine_entry('small', Registry(Path(sys.argv[1])), FileDigests())\n"
        "assert 'nested deeper' in found[0].text; print([m for m in ('torch', 'transformers', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(fleet.registry.root)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_budget_without_limit_is_a_value(fleet):
    fleet.write(capture={"budget_gb": float("inf")})
    assert examine_entry("small", fleet.registry, FileDigests(), fleet.root / "var") == examine_entry(
        "small", fleet.registry, FileDigests(), fleet.root / "var"
    )


def test_a_system_prompt_that_is_not_read_is_a_warning(fleet):
    rows = [json.loads(line) for line in fleet.chats.read_text().splitlines()]
    fleet.write_rows([{**row, "system_prompt": "Be a pirate."} for row in rows])
    assert any("system_prompt (" in one and one.endswith("rename system_prompt") for one in fleet.check().warnings)
