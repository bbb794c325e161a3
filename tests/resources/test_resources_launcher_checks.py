"""What schedulers are asked about before a run: jobs of the shape that the run will submit. A script stands for sbatch."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftworks.targets.registry import Registry
from resources.launcher_checks import find_launcher_problems


def make_registry(folder: Path, **target: object) -> Registry:
    """A registry whose jobs run in a Slurm that takes everything and writes down the options."""
    script = folder / "bin" / "sbatch"
    (folder / "registry" / "targets").mkdir(parents=True)
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\ngrep -h "^#SBATCH" | tr "\\n" " " >>"{folder}/asked"\necho >>"{folder}/asked"\n')
    script.chmod(0o755)
    launcher = {"kind": "slurm", "commands": str(script.parent)}
    values = {"model": "/nowhere", "dataset": "tiny", **target}
    (folder / "registry" / "deployment.yaml").write_text(yaml.safe_dump({"launcher": launcher}))
    (folder / "registry" / "targets" / "one.yaml").write_text(yaml.safe_dump(values))
    return Registry(folder / "registry")


def ask(registry: Registry, program: str) -> str:
    assert find_launcher_problems(registry.load_target("one"), registry, [program]) == []
    (asked,) = (registry.root.parent / "asked").read_text().splitlines()
    return asked


@pytest.mark.parametrize(
    ("capture", "gpus"),
    [
        ({"backend": "hf", "device": "cuda", "processes": 2}, 2),
        ({"backend": "sglang_server", "device": "cuda", "server": {"tp_size": 4, "replicas": 2}}, 8),
        ({"backend": "hf", "device": "cpu"}, None),
    ],
    ids=["processes", "servers", "cpu"],
)
def test_a_capture_is_asked_for_with_the_gpus_of_its_processes_and_servers(tmp_path: Path, capture, gpus):
    asked = ask(make_registry(tmp_path, capture=capture), "capture")
    assert (f"--gpus-per-node={gpus} " in asked) if gpus else ("--gpus" not in asked)


@pytest.mark.parametrize(("endpoint", "gpus"), [(None, 4), ("https://answers/v1", 1)], ids=["own", "elsewhere"])
def test_answers_need_the_gpus_of_servers_unless_an_endpoint_gives_them(tmp_path: Path, endpoint, gpus):
    capture = {"backend": "sglang_server", "device": "cuda", "server": {"tp_size": 4}}
    responses = (
        {}
        if endpoint is None
        else {"responses": {"endpoint": {"base_urls": [endpoint], "model": "m", "server": "vllm"}}}
    )
    assert f"--gpus-per-node={gpus} " in ask(make_registry(tmp_path, capture=capture, **responses), "regenerate")
