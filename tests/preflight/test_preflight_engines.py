"""What the engine that runs a target needs is there, and what it captures can be compared or need not be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, get_hf_quantizer

FP8 = {"quant_method": "compressed-tensors"}
CUSTOM = {"backend": "custom", "custom": {"entry_point": "no_such_package.engine:load", "engine": "mine"}}


def quantize(fleet, config: dict[str, Any], **entry: Any) -> None:
    path = fleet.own_model() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    fleet.write(model=str(path.parent), **entry)


@pytest.mark.parametrize("allowed", [False, True])
def test_what_cannot_be_compared_is_refused_unless_it_is_allowed(fleet, allowed: bool):
    quantize(fleet, {"quantization_config": FP8}, capture={"allow_unprobed": allowed})
    told = [error for error in fleet.check().errors if "capture.allow_unprobed: true" in error]
    assert len(told) == (not allowed)
    assert all("quantised (compressed-tensors)" in error for error in told)


def test_arguments_that_change_the_numbers_are_refused_unless_they_are_allowed(fleet):
    server = {"url": "http://127.0.0.1:9", "spool": str(fleet.root), "args": ["--quantization", "fp8"]}
    for allowed in (False, True):
        fleet.write(capture={"backend": "sglang_server", "server": server, "allow_unprobed": allowed})
        assert any("--quantization, which changes" in error for error in fleet.check().errors) != allowed


@pytest.mark.parametrize(
    ("capture", "prompts", "keys"),
    [
        ({}, 16, ["capture.backend hf", "evaluation.loop"]),
        ({}, 0, ["capture.backend hf"]),
        (
            {"backend": "sglang_server", "server": {"url": "http://127.0.0.1:9", "spool": "/tmp"}},
            16,
            ["evaluation.loop"],
        ),
    ],
)
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_missing_package_of_a_quantisation_is_named_where_transformers_loads(fleet, capture, prompts, keys, kind):
    method = {"quantization_config": {"quant_method": "gptq"}}
    (fleet.registry.root / "deployment.yaml").write_text(yaml.safe_dump({"launcher": {"kind": kind}}))
    quantize(fleet, method, capture={**capture, "allow_unprobed": True}, evaluation={"loop": {"prompts": prompts}})
    found = fleet.check()
    told = [text for text in (found.errors if kind == "local" else found.warnings) if "quantised (" in text]
    assert [text.split(": ")[1] for text in told] == keys
    assert all("pip install optimum gptqmodel" in text for text in told)


def find_refusal(folder: Path) -> str | None:
    """What transformers' own loader raises before it looks at a weight; None if it would go on."""
    try:
        found, _, _ = get_hf_quantizer(AutoConfig.from_pretrained(folder), None, None, True, {})
    except Exception as error:
        return str(error)
    return None if found is not None else "skipped"


@pytest.mark.parametrize("method", [*AUTO_QUANTIZATION_CONFIG_MAPPING, "of_tomorrow"])
def test_every_quantisation_that_transformers_refuses_here_is_known_before_the_run(fleet, method: str):
    """And none else is: the check asks transformers about those that have all of their packages."""
    kind, _, bits = method.partition("_4bit" if "_4bit" in method else "_8bit")
    config = {"quant_method": kind} | ({} if not bits and kind == method else {f"load_in_{method[-4:]}": True})
    quantize(fleet, {"quantization_config": config}, capture={"allow_unprobed": True})
    # Of sinq transformers takes the absence of its package for a presence, and fails when it imports it.
    refused = find_refusal(fleet.root / "model") is not None or method == "sinq"
    told = [error for error in fleet.check().errors if f"quantised ({kind})" in error]
    assert [error.split(": ")[1] for error in told] == ["capture.backend hf", "evaluation.loop"] * refused


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes", "hqq"])
def test_an_engine_that_loads_a_quantisation_is_named_beside_its_packages(fleet, method: str):
    quantize(fleet, {"quantization_config": {"quant_method": method}}, capture={"allow_unprobed": True})
    (told,) = [error for error in fleet.check().errors if "capture.backend hf" in error]
    assert "pip install" in told
    assert ("use backend sglang, which loads it" in told) == (method != "hqq")


def test_what_sglang_does_not_load_is_a_warning_for_its_backends(fleet):
    for method, told in (("hqq", 1), ("fp8", 0)):
        quantization = {"quantization_config": {"quant_method": method}}
        quantize(fleet, quantization, capture={"backend": "sglang", "allow_unprobed": True})
        assert sum("which SGLang 0.5.23 does not know" in text for text in fleet.check().warnings) == told
        shutil.rmtree(fleet.root / "model")


def test_a_checkpoint_of_modelopt_is_known_by_its_own_file(fleet):
    (fleet.own_model() / "hf_quant_config.json").write_text("{}")
    fleet.write(model=str(fleet.root / "model"))
    assert any("quantised (modelopt)" in error for error in fleet.check().errors)


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_custom_engine_that_is_not_there_is_an_error_where_it_runs(fleet, kind: str):
    (fleet.registry.root / "deployment.yaml").write_text(yaml.safe_dump({"launcher": {"kind": kind}}))
    fleet.write(capture=CUSTOM)
    found = fleet.check()
    (told,) = [text for text in (found.errors if kind == "local" else found.warnings) if "entry_point" in text]
    assert "there is no module no_such_package.engine here" in told


def test_a_custom_engine_that_is_there_is_not_imported(fleet, tmp_path, monkeypatch):
    package = tmp_path / "modules" / "my_engines"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "first.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    for module, there in (("my_engines.first", True), ("my_engines.second", False)):
        fleet.write(capture={"backend": "custom", "custom": {"entry_point": f"{module}:load", "engine": "mine"}})
        assert fleet.check().errors == [] if there else "there is no module" in fleet.check().errors[0]


@pytest.mark.parametrize("wanted", [True, False])
def test_tensorboard_that_is_not_installed_is_refused_where_it_is_wanted(fleet, monkeypatch, wanted: bool):
    monkeypatch.setattr("draftworks.config.trackers.find_spec", lambda name: None)
    fleet.write(strategies={"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"tensorboard": wanted}}})
    told = [error for error in fleet.check().errors if "TensorBoard is not installed" in error]
    assert len(told) == wanted
    assert all("strategies.eagle3.training.tensorboard" in error for error in told)
