"""The batch script of a Slurm job: its options, and that a shell takes it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from draftworks.config.launchers import SlurmLauncherSpec
from draftworks.errors import ConfigError
from resources.scheduler import JobRequest
from resources.slurm_script import build_options, write_script
from resources.torch_job import RunDir, TorchJob


def make_request(folder: Path, min_nodes: int | None = None, **job) -> JobRequest:
    folder.mkdir(parents=True, exist_ok=True)
    return JobRequest("dw-1", TorchJob("m", **job), {"KEY": "hush"}, RunDir(folder), folder / "job.json", min_nodes)


def read_options(request: JobRequest, **settings) -> dict[str, str]:
    found = [shlex.split(option)[0] for option in build_options(request, SlurmLauncherSpec(**settings))]
    return {name: value for name, _, value in (each.partition("=") for each in found)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"--gpus-per-node": "8"}),
        ({"gpu_type": "h100"}, {"--gpus-per-node": "h100:8"}),
        ({"gpus": "gres"}, {"--gres": "gpu:8"}),
        ({"gpus": "gres", "gpu_type": "h100"}, {"--gres": "gpu:h100:8"}),
        ({"gpus": "none"}, {}),
    ],
)
def test_gpus_are_asked_for_as_the_cluster_wants(settings: dict, expected: dict[str, str], tmp_path: Path):
    found = read_options(make_request(tmp_path, gpus_per_node=8, procs_per_node=8), **settings)
    assert {key: value for key, value in found.items() if "gpu" in key or key == "--gres"} == expected


def test_settings_become_options_and_those_not_given_none(tmp_path: Path):
    request = make_request(tmp_path / "a b%", nodes=4, procs_per_node=2)
    found = read_options(
        request, partition="p", account="a", qos="q", memory="0", threads=3, time_limit_s=5400, sbatch=["--exclusive"]
    )
    expected = {
        "--job-name": "dw-1",
        "--comment": str(request.claim),
        "--output": str(request.files.log).replace("%", "%%"),
        "--nodes": "4",
        "--cpus-per-task": "6",
        "--partition": "p",
        "--account": "a",
        "--qos": "q",
        "--mem": "0",
        "--time": "90",
        "--signal": "B:TERM@90",
        "--no-requeue": "",
        "--exclusive": "",
    }
    assert expected.items() <= found.items()
    assert not {"--time", "--partition", "--mem", "--gres"} & read_options(request).keys()


def test_after_a_lost_node_fewer_are_enough(tmp_path: Path):
    assert read_options(make_request(tmp_path, min_nodes=2, nodes=4))["--nodes"] == "2-4"
    assert read_options(make_request(tmp_path, min_nodes=4, nodes=4))["--nodes"] == "4"


def test_a_limit_that_leaves_no_time_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="a time_limit_s of 60 is over before anything is done.*Raise time_limit_s"):
        build_options(make_request(tmp_path), SlurmLauncherSpec(time_limit_s=60, grace_s=40))


def test_the_signal_to_save_comes_after_the_start_of_the_job(tmp_path: Path):
    """At the boundary, too: with 30 s of grace and 30 s of margin a job of a minute would get it at once."""
    with pytest.raises(ConfigError, match="is over before anything is done"):
        build_options(make_request(tmp_path), SlurmLauncherSpec(time_limit_s=60, grace_s=30))
    assert read_options(make_request(tmp_path), time_limit_s=60, grace_s=29)["--signal"] == "B:TERM@59"


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_script_is_shell_without_the_jobs_environment(nodes: int, tmp_path: Path):
    spec = SlurmLauncherSpec(setup=["module load 'cuda'"], commands="/opt/slurm 23/bin", grace_s=7.5)
    script = write_script(make_request(tmp_path, nodes=nodes, args=("a 'b'",)), spec)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text()
    assert "hush" not in text
    assert "module load 'cuda'" in text
    assert "export PATH='/opt/slurm 23/bin':" in text


def test_copies_are_an_array_with_files_of_their_own(tmp_path: Path):
    request = make_request(tmp_path / "50%", copies=3)
    found = read_options(request)
    assert found["--array"] == "0-2"
    assert "--requeue" in found
    assert "--no-requeue" not in found
    assert found["--output"].replace("%a", "2").replace("%%", "%") == str(request.files.of_copy(2).log)
    script = write_script(request, SlurmLauncherSpec()).read_text()
    begin, body = script.index("marks="), script.index("shopt")
    own = f"{script[begin:body]}\necho $ranks $TORCHELASTIC_ERROR_FILE $DRAFTWORKS_COPY $job"
    slurm = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    env = {"PATH": "/usr/bin:/bin", "TORCHELASTIC_ERROR_FILE": str(request.files.error)}
    copy = request.files.of_copy(2)
    copy.ranks.mkdir(parents=True)

    def act(**more: str) -> list[str]:
        done = subprocess.run(["bash", "-c", own], env={**env, **more}, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert act(**slurm) == [str(copy.ranks), str(copy.error), "2", "7_2"]
    assert not copy.ranks.exists(), "an earlier start's are put away"
    assert len(list((request.files.path / "earlier").glob("copy2-*"))) == 1
    assert act(SLURM_JOB_ID="9") == [str(request.files.ranks), str(request.files.error), "9"]
