"""Settings of the launcher for Slurm: what it is given as options, and what it keeps for itself."""

from __future__ import annotations

import pytest

from draftworks.config.launchers import SlurmLauncherSpec, merge_launcher, parse_launcher
from draftworks.errors import ConfigError


def test_a_target_chooses_another_partition_for_one_program():
    deployment = parse_launcher({"kind": "slurm", "partition": "gpu", "programs": {"train": {"nodes": 2}}}, "launcher")
    target = {"partition": "big", "programs": {"train": {"min_nodes": 1, "sbatch": ["--exclusive"]}}}
    train = merge_launcher(deployment, target, "train", "launcher")
    assert isinstance(train, SlurmLauncherSpec)
    assert (train.partition, train.nodes, train.least_nodes, train.sbatch) == ("big", 2, 1, ["--exclusive"])
    evaluate = merge_launcher(deployment, target, "evaluate", "launcher")
    assert (evaluate.nodes, evaluate.kind) == (1, "slurm")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--nodes=3", "keys nodes and min_nodes"),
        ("-N 3", "keys nodes and min_nodes"),
        ("--time=10", "key time_limit_s"),
        ("--requeue", "it submits again what was interrupted"),
        ("--output=x", "the log is beside the run file"),
        ("exclusive", "expected options of sbatch"),
        ("--exclusive\nrm -rf /", "expected options of sbatch"),
    ],
)
def test_options_of_its_own_are_refused_by_name(option: str, words: str):
    with pytest.raises(ConfigError, match=f"launcher: sbatch: .*{words}"):
        parse_launcher({"kind": "slurm", "sbatch": [option]}, "launcher")


def test_lines_of_shell_are_single_lines():
    with pytest.raises(ConfigError, match="launcher: setup: expected one line per entry"):
        parse_launcher({"kind": "slurm", "setup": ["a\nb"]}, "launcher")
