"""What is launched for a program: the Python that runs it, where it runs, and the identity by which it is found again.

The Python is that of SGLang's environment if the program runs SGLang itself, and only if it has all it needs.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from draftworks.config.launchers import LocalLauncherSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import CaptureRun, RunFile, TargetFiles
from draftworks.errors import ConfigError
from resources.job_identity import identify_job
from resources.torch_job import TorchJob
from resources.workspace import Workspace
from spec_assets.common import launch

CONTEXT = SimpleNamespace(
    run=SimpleNamespace(run_id="0123456789"),
    op_execution_context=SimpleNamespace(op_handle=SimpleNamespace(name="training_features")),
    asset_key=dg.AssetKey("training_features"),
    partition_key="t",
)
TARGET = "model: m\ndataset: d\n"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    pythons = "\n".join(f"{name}: {{python: {name}/bin/python}}" for name in ("sglang", "vllm"))
    (tmp_path / "deployment.yaml").write_text(f"{pythons}\nvar: var\n")
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "t.yaml").write_text(TARGET)
    return Workspace(registry_root=str(tmp_path))


def engine_python(registry: Path, name: str) -> Path:
    """A fake environment that reports an engine and no missing package."""
    python = registry / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$2" in *version*) echo 0.5.23;; esac\n')
    python.chmod(0o755)
    return python


def launched(workspace: Workspace, folder: Path, backend: str) -> TorchJob:
    """Return the job that a capture with this backend launches."""
    jobs: list[TorchJob] = []
    launcher = SimpleNamespace(run=lambda context, job, run_dir, companions: jobs.append(job))
    python = workspace.find_python(CaptureSpec(backend=backend))
    launch(CONTEXT, launcher, workspace, "capture", RunFile(out=folder / "out"), 1, "cpu", python)
    return jobs[0]


@pytest.mark.parametrize("backend", ["hf", "sglang_server"])
def test_most_programs_are_run_by_the_python_that_runs_dagster(workspace, tmp_path, backend: str):
    job = launched(workspace, tmp_path, backend)
    assert job.python is None
    assert "PYTHONPATH" not in job.env


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_what_has_an_engine_inside_is_run_by_its_python_and_finds_this_package_there(workspace, tmp_path, backend: str):
    python = engine_python(tmp_path, backend)
    job = launched(workspace, tmp_path, backend)
    assert job.python == python
    assert [link.name for link in Path(job.env["PYTHONPATH"]).iterdir()] == ["draftworks"]


def test_without_that_python_nothing_is_launched(workspace, tmp_path):
    with pytest.raises(ConfigError, match=r"sglang/bin/python \(sglang.python of the deployment\) cannot be run"):
        launched(workspace, tmp_path, "sglang")


def test_a_job_runs_where_target_and_program_say(workspace, tmp_path):
    assert launched(workspace, tmp_path, "hf").launcher == LocalLauncherSpec()
    settings = "launcher: {threads: 2, nodes: 3, min_nodes: 1, programs: {capture: {threads: 4}}}\n"
    (tmp_path / "targets" / "t.yaml").write_text(TARGET + settings)
    job = launched(workspace, tmp_path, "hf")
    assert (job.launcher.threads, job.launcher.nodes, job.nodes) == (4, 3, 1)
    (tmp_path / "targets" / "t.yaml").write_text(TARGET + "launcher: {nodes: 3}\n")
    assert launched(workspace, tmp_path, "hf").nodes == 3


def test_the_same_work_is_the_same_job_and_where_it_runs_is_no_part_of_it(workspace, tmp_path):
    first = launched(workspace, tmp_path, "hf").identity
    assert first.claim == tmp_path / "out" / "job.json"
    assert first.made == "t/training_features"
    assert re.fullmatch("dw-[0-9a-f]{1,40}", first.name)
    (tmp_path / "targets" / "t.yaml").write_text(TARGET + "launcher: {threads: 3}\n")
    assert launched(workspace, tmp_path, "hf").identity == first
    assert launched(workspace, tmp_path / "other", "hf").identity.name != first.name


def test_a_job_beside_another_has_its_claim_beside_its_own_output(tmp_path):
    run = RunFile(out=tmp_path / "figures")
    alone, beside = (identify_job("a", "t", run, run.save(tmp_path / "run.yaml"), role) for role in ("", "worker1"))
    assert alone.claim == tmp_path / "figures" / "job.json"
    assert beside.claim == tmp_path / "worker1.job.json"
    assert alone.name != beside.name
    assert (alone.made, beside.made) == ("t/a", "t/a/worker1")


@pytest.mark.parametrize(
    ("capture", "device", "gpus"),
    [
        ({}, "auto", 2),
        ({"backend": "sglang", "server": {"tp_size": 4}}, "cuda", 8),
        ({"backend": "sglang_server", "server": {"tp_size": 2, "dp_size": 2, "replicas": 2}}, "auto", 16),
        ({"backend": "sglang_server", "server": {"tp_size": 2}}, "cpu", 0),
        ({"backend": "sglang_server", "server": {"url": "http://a:1", "spool": "/s", "tp_size": 2}}, "auto", 2),
        ({"server": {"tp_size": 2}}, "auto", 2),
    ],
    ids=["one each", "tensor parallel", "several servers", "no GPU", "a server of yours", "not used"],
)
def test_a_job_asks_for_the_gpus_of_the_servers_that_it_starts(workspace, tmp_path, capture, device, gpus):
    target = TargetFiles(
        name="t", model="m", tokenizer="m", digest="0" * 16, tokenizer_digest="1" * 16, num_layers=2, hidden_size=8,
        vocab_size=16, context=32,
    )  # fmt: skip
    run = CaptureRun(
        out=tmp_path / "out", target=target, tokens=tmp_path, taps=[1], store=tmp_path, capture=CaptureSpec(**capture)
    )
    jobs: list[TorchJob] = []
    launcher = SimpleNamespace(run=lambda context, job, run_dir, companions: jobs.append(job))
    launch(CONTEXT, launcher, workspace, "capture", run, 2, device, None)
    assert jobs[0].gpus_per_node == gpus
