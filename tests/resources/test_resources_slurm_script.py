"""The batch script of a Slurm job: its options, and that a shell takes it.
What Slurm's records say of plain jobs and of arrays.
What Slurm's commands print, as values and errors; a shell script stands for each command.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from draftworks.config.launchers import SlurmLauncherSpec
from draftworks.errors import ConfigError, DraftworksError, LauncherError
from resources.scheduler import DeadCopy, JobRequest
from resources.slurm_commands import SlurmCommands, SlurmRecord
from resources.slurm_scheduler import describe_records, find_hopeless, is_final
from resources.slurm_script import LOST_NODE_EXIT, build_options, write_script
from resources.torch_job import JobState, RunDir, TorchJob


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


def record(
    state: str, copy: int | None = None, exit_code: int = 0, reason: str = "", restarts: str = "0"
) -> SlurmRecord:
    return SlurmRecord("7", "dw-1", state, exit_code, reason, "/claim", copy, restarts)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["COMPLETED", "RUNNING", "PENDING"], JobState.RUNNING),
        (["COMPLETED", "FAILED", "PENDING"], JobState.PENDING),
        (["COMPLETED", "FAILED", "CANCELLED"], JobState.FAILED),
        (["COMPLETED", "COMPLETED"], JobState.SUCCEEDED),
        (["COMPLETED", "CANCELLED"], JobState.SUCCEEDED),
        (["CANCELLED", "CANCELLED"], JobState.CANCELLED),
    ],
)
def test_an_array_has_ended_when_all_its_elements_have(states: list[str], expected: JobState):
    seen = describe_records([record(state, copy) for copy, state in enumerate(states)])
    assert (seen.id, seen.state) == ("7", expected)


def test_dead_elements_are_named_with_their_life():
    elements = [
        record("RUNNING", 0),
        record("FAILED", 1, 9, restarts="2"),
        record("NODE_FAIL", 2),
        record("COMPLETED", 3),
    ]
    assert describe_records(elements).dead == (DeadCopy(1, "2"), DeadCopy(2, "0", lost=True))
    assert describe_records([record("CANCELLED", 0), record("RUNNING", 1)]).dead == ()


def test_an_array_is_lost_if_slurm_ended_all_that_died():
    lost = [record("PREEMPTED", 0), record("FAILED", 1, LOST_NODE_EXIT), record("COMPLETED", 2)]
    assert describe_records(lost).lost
    assert not describe_records([*lost, record("FAILED", 3, 1)]).lost


def test_a_plain_job_has_no_copies():
    seen = describe_records([record("FAILED", exit_code=3)])
    assert (seen.state, seen.reason, seen.dead) == (JobState.FAILED, "exit code 3 of the job's script", ())


def test_what_can_never_start_is_found_in_any_element():
    assert find_hopeless([record("RUNNING", 0), record("PENDING", 1, reason="BadConstraints")]) == "BadConstraints"
    assert find_hopeless([record("PENDING", 1, reason="Resources")]) == ""
    assert is_final(record("TIMEOUT"))
    assert not is_final(record("REQUEUED"))


def play(folder: Path, name: str, words: str, code: int = 1) -> SlurmCommands:
    script = folder / name
    (folder / "words").write_text(words)
    script.write_text(f'#!/bin/sh\ncat >"{folder}/read"\ncat "{folder}/words" >&2\nexit {code}\n')
    script.chmod(0o755)
    return SlurmCommands(str(folder))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (
            "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified",
            ConfigError,
        ),
        ("sbatch: error: Memory specification can not be satisfied\nallocation failure: not available", ConfigError),
        ("allocation failure: Unable to contact slurm controller (connect failure)", LauncherError),
        ("sbatch: error: Munge decode failed: Rewound credential", LauncherError),
        ("sbatch: error: Protocol authentication error", LauncherError),
    ],
    ids=["partition", "memory", "unreachable", "clock", "credentials"],
)
def test_a_script_that_would_be_refused_is_told_apart_from_a_controller_that_cannot_be_asked(
    tmp_path: Path, words: str, kind: type[DraftworksError]
):
    with pytest.raises(DraftworksError) as caught:
        play(tmp_path, "sbatch", words).test(["--nodes=1"])
    assert type(caught.value) is kind
    assert words.splitlines()[0].removeprefix("sbatch: error: ") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "allocation failure: Requested node configuration is not available",
        "allocation failure: Required partition not available (inactive or drain)",
        "allocation failure: Requested nodes are busy",
    ],
    ids=["nodes", "partition", "busy"],
)
def test_what_is_down_may_come_back(tmp_path: Path, words: str):
    play(tmp_path, "sbatch", words).test(["--nodes=1"])
    assert "#SBATCH --nodes=1" in (tmp_path / "read").read_text().splitlines()


def test_options_of_the_allocation_in_which_we_run_reach_no_job_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Slurm takes such variables for options: the job would get the nodes and the memory of the other one."""
    allocation = {
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_MEM_PER_NODE": "9",
        "SBATCH_PARTITION": "p",
        "SRUN_DEBUG": "3",
        "SQUEUE_ALL": "1",
    }
    kept = {"SLURM_CONF": "/etc/other.conf", "OURS": "stays"}
    for name, value in {**allocation, **kept}.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "sbatch"
    script.write_text(f'#!/bin/sh\nenv >"{tmp_path}/environment"\n')
    script.chmod(0o755)
    SlurmCommands(str(tmp_path)).test(["--nodes=1"])
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert not allocation.keys() & found.keys()
    assert kept.items() <= found.items()
