"""A job that runs on this machine finds the GPUs that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftworks.preflight.findings import Findings
from draftworks.preflight.machine import check_devices

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
