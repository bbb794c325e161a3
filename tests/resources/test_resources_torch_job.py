"""Command lines, counts and folders of jobs, without running one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftworks.config.capture import SGLangSpec
from draftworks.config.data import EndpointSpec, ResponseSpec
from draftworks.config.run_files import CaptureRun, RegenerateRun, TrainRun
from draftworks.errors import ConfigError
from resources.torch_job import ONE_NODE, RunDir, TorchJob


def test_command_is_torchruns_with_a_rendezvous_of_its_own() -> None:
    command = TorchJob("draftworks.programs.train", ("run.yaml",), procs_per_node=2).build_command("--log-dir=x")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *ONE_NODE, "--log-dir=x", "--nproc-per-node=2"]
    assert command == [*torchrun, "-m", "draftworks.programs.train", "run.yaml"]


def test_another_python_runs_torchrun_and_with_it_every_rank() -> None:
    assert TorchJob("m", python=Path("/other/python")).build_command()[:3] == [
        "/other/python",
        "-m",
        "torch.distributed.run",
    ]


def test_command_takes_the_rendezvous_of_a_cluster() -> None:
    command = TorchJob("m", nodes=2).build_command("--nnodes=2", "--rdzv-endpoint=host:1")
    assert not set(ONE_NODE) & set(command)


@pytest.mark.parametrize("counts", [{"nodes": 0}, {"procs_per_node": 0}, {"gpus_per_node": -1}])
def test_impossible_counts_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TorchJob("m", **counts)


def test_every_attempt_has_a_folder_of_its_own(tmp_path: Path) -> None:
    attempts = [RunDir.create(tmp_path, "0123456789", retry).path for retry in (0, 0, 1)]
    assert [path.name for path in attempts] == ["01234567-retry0", "01234567-retry0-2", "01234567-retry1"]


def test_launchers_import_no_torch() -> None:
    code = "import resources.local_launcher, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_program_may_wait_as_long_as_what_it_asks_may_take() -> None:
    sglang = SGLangSpec(start_timeout_s=7, request_timeout_s=8)
    endpoint = EndpointSpec.model_construct(timeout_s=9)
    responses = ResponseSpec.model_construct(endpoint=endpoint)
    assert RegenerateRun.model_construct(sglang=sglang, responses=responses).longest_wait_s == 9
    assert CaptureRun.model_construct(sglang=sglang).longest_wait_s == 8
    assert TrainRun.model_construct().longest_wait_s == 0
