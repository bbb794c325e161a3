"""What Slurm's commands print, as values and errors; a shell script stands for each command."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.errors import ConfigError, DraftworksError, LauncherError
from resources.slurm_commands import SlurmCommands


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
