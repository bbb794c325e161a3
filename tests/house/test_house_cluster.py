"""The servers of `make test-cluster`: they start from what is unpacked, and end without a trace."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from slurm_cluster import NODES, UNPACKED, find_daemons, slurm_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_slurm_runs_a_job_on_two_nodes_and_leaves_nothing(tmp_path: Path) -> None:
    with slurm_cluster() as cluster:
        said = cluster.ask("srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", "echo $SLURMD_NODENAME")
        assert sorted(said.split()) == list(NODES)
        assert len(find_daemons(f"{cluster.folder}:")) >= 4
        lingering = tmp_path / "linger.sh"
        lingering.write_text("#!/bin/sh\nsleep 600\n")
        cluster.ask("sbatch", f"--output={tmp_path}/log", str(lingering))
    assert not find_daemons(f"{cluster.folder}:")
    assert not cluster.folder.exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if "linger" in " ".join(p.info["cmdline"] or [])]


def test_what_cannot_start_is_an_error_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_cluster.CONFIGURATION", "ClusterName=broken\nNoSuchKey=1\n")
    first_to_end = r"(slurmctld|n1|n2) ended with exit code \d+:\n.*NoSuchKey"
    with pytest.raises(RuntimeError, match=first_to_end), slurm_cluster():
        pass


def test_packages_are_unpacked_beside_the_project() -> None:
    assert (UNPACKED / "usr/sbin/slurmctld-wlm").exists()
