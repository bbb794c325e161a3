"""Checks of this machine's GPUs for a target's jobs that run here. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import resolve_strategy
from draftworks.preflight.findings import Findings
from draftworks.preflight.placement import runs_here
from draftworks.targets.machine import DEVICES, read_machine
from draftworks.targets.registry import Registry


@dataclass(frozen=True)
class GpuUse:
    """GPUs that the jobs of one program ask for.

    Attributes:
        key: of the registry entry, for messages.
        gpus: by all processes of a machine.
    """

    key: str
    device: str
    gpus: int


def check_devices(target: TargetSpec, registry: Registry, findings: Findings, devices: Path = DEVICES) -> None:
    """Check that jobs that run here find the GPUs that they ask for.

    Args:
        devices: folder of the machine's device files.
    """
    machine = read_machine(devices)
    if machine.other_gpu:
        return
    found = machine.gpus
    for use in _list_uses(target, registry):
        if use.device == "cuda" and found < use.gpus:
            findings.error(
                f"target {target.name}: {use.key}.device: cuda needs {use.gpus} GPU(s) for the processes of a machine, and "
                f"this one has {found}. Lower the processes, use cpu, or another launcher"
            )
    if not found:
        _check_work_on_a_cpu(target, registry, findings)


def _list_uses(target: TargetSpec, registry: Registry) -> list[GpuUse]:
    capture, serving = target.capture, target.evaluation.serving
    uses = []
    if runs_here(target, registry, "capture") and not capture.server.external:
        uses.append(GpuUse("capture", capture.device, capture.processes * capture.gpus_per_process))
    if runs_here(target, registry, "train"):
        trained = {name: entry.training for name, entry in target.strategies.items()}
        uses += [GpuUse(f"strategies.{name}.training", one.device, one.processes) for name, one in trained.items()]
    if serving.prompts and runs_here(target, registry, "serve"):
        uses.append(GpuUse("evaluation.serving", serving.device, serving.server.gpus))
    return uses


def _check_work_on_a_cpu(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check what device auto will be a CPU for, and cannot be done on one."""
    where, serving = f"target {target.name}", target.evaluation.serving
    if runs_here(target, registry, "train"):
        for name, entry in target.strategies.items():
            options = resolve_strategy(name).parse_options(entry.options, where=f"{where}: {name}")
            if entry.training.device == "auto" and getattr(options, "attention", None) == "flex":
                findings.error(
                    f"{where}: {name}: attention flex has no gradients on a CPU, and training.device auto is one here: set "
                    "options.attention to sdpa or auto"
                )
    asked = serving.prompts and serving.device == "auto" and runs_here(target, registry, "serve")
    if asked and serving.compute_dtype != "float32":
        findings.warning(
            f"{where}: evaluation.serving.compute_dtype: {serving.compute_dtype}, and device auto is a CPU here, where "
            "SGLang speculates in float32 only: set float32"
        )
