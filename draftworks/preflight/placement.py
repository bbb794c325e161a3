"""Checks of where a target's jobs run against what they do: batches by nodes, addresses of a stream. Torch-free."""

from __future__ import annotations

from draftworks.config.launchers import LOCAL
from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.preflight.findings import Findings
from draftworks.targets.registry import Registry

_LOOPBACK = ("127.", "localhost", "[::1]")


def runs_here(target: TargetSpec, registry: Registry, program: str) -> bool:
    """Whether the jobs of a program run on the machine of their launcher alone."""
    launcher = registry.resolve_launcher(target, program)
    return launcher.kind == LOCAL and launcher.nodes == 1


def check_placement(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    _check_batches(target, registry, findings)
    _check_stream_addresses(target, registry, findings)


def _check_batches(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that each global batch can be divided over the ranks of all nodes, also of those left when some are lost."""
    launcher = registry.resolve_launcher(target, "train")
    for name, entry in target.strategies.items():
        where = f"target {target.name}: strategies.{name}.training"
        problem = _find_batch_problem(entry.training, launcher.nodes)
        if problem:
            findings.error(f"{where}: {problem}. Correct it, or launcher.programs.train.nodes")
            continue
        for nodes in range(launcher.least_nodes, launcher.nodes):
            problem = _find_batch_problem(entry.training, nodes)
            if problem:
                findings.warning(
                    f"{where}: a training that goes on with {nodes} of {launcher.nodes} nodes (launcher min_nodes) would end: "
                    f"{problem}"
                )


def _find_batch_problem(training: TrainingSpec, nodes: int) -> str:
    """Return why a training cannot be divided over so many nodes; empty if it can."""
    ranks, batch = nodes * training.processes, training.global_batch_size
    if training.pack_tokens is not None:
        return f"global_batch_size {batch} gives {ranks} ranks less than a sample each" if batch < ranks else ""
    share = training.micro_batch_size * ranks
    if batch % share == 0:
        return ""
    return (
        f"global_batch_size {batch} is not a multiple of micro_batch_size {training.micro_batch_size} x {nodes} nodes x "
        f"processes {training.processes} = {share}"
    )


def _check_stream_addresses(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Warn of addresses that only this host reaches where jobs of a stream may run on others.

    No error: a scheduler's jobs may all run on the launcher's own host.
    """
    streaming = target.streaming
    if streaming is None or all(runs_here(target, registry, program) for program in ("train", "produce")):
        return
    where = f"target {target.name}: streaming"
    if streaming.control is None:
        findings.warning(
            f"{where}.control: null, and its jobs may run on hosts without the control plane's database: set control.listen to "
            "an address of this host that they reach"
        )
    elif streaming.control.listen.startswith(_LOOPBACK):
        findings.warning(
            f"{where}.control.listen: {streaming.control.listen} is reached from the launcher's own host only, and its jobs "
            "may run on others: name an address of it that they reach"
        )
    if streaming.store.kind == "mooncake" and streaming.store.host.startswith(_LOOPBACK):
        findings.warning(
            f"{where}.store.host: {streaming.store.host} is reached from the launcher's own host only, and its jobs may run "
            "on others: name an address of it that they reach"
        )
