"""Asks the schedulers of targets whether they would take their jobs, before anything is computed for them.

    python -m resources.launcher_checks REGISTRY TARGET...    prints the problems of each target as JSON

It is a program of its own as well, since `draftworks check` is part of the engine, which knows no launcher.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from draftworks.config.launchers import LOCAL, LauncherSpec
from draftworks.config.registry_files import TargetSpec
from draftworks.errors import DraftworksError
from draftworks.targets.registry import Registry
from resources.launchers import make_scheduler
from resources.scheduler import NAME_PREFIX, JobRequest
from resources.torch_job import RunDir, TorchJob

_NAME = f"{NAME_PREFIX}check"


@dataclass(frozen=True)
class _Shape:
    """What a program's job asks for on each node; `gpus` is 0 for one that computes on the CPU."""

    processes: int = 1
    gpus: int = 0

    @classmethod
    def on(cls, device: str, processes: int = 1) -> _Shape:
        return cls(processes, 0 if device == "cpu" else processes)


def find_launcher_problems(
    target: TargetSpec, registry: Registry, programs: Collection[str] | None = None
) -> list[str]:
    """Return why schedulers cannot be asked, or would refuse, jobs of a target's programs; each reason once.

    Args:
        programs: of the assets that are to be made; None: all that the target uses.
    """
    found: dict[str, list[str]] = {}
    answers: dict[tuple[str, _Shape], str | None] = {}
    for program, shape in _list_jobs(target):
        if programs is not None and _STARTED_BY.get(program, program) not in programs:
            continue
        spec = registry.resolve_launcher(target, program)
        asked = (f"{spec.kind} {spec.model_dump_json(exclude={'programs'})}", shape)
        if asked not in answers:
            answers[asked] = _ask(spec, shape, registry)
        problem = answers[asked]
        if problem is not None and program not in found.setdefault(problem, []):
            found[problem].append(program)
    return [f"target {target.name}: jobs of {', '.join(who)}: {problem}" for problem, who in found.items()]


_STARTED_BY = {"plan": "capture", "produce": "train", "memory": "train", "export": "evaluate"}
"""Programs that no asset names: by each, one whose asset starts it, or without whose asset it has nothing to do."""


def _list_jobs(target: TargetSpec) -> Iterator[tuple[str, _Shape]]:
    """Yield program and shape of the jobs that the assets of a target start."""
    capture = target.capture
    whole = _Shape.on(capture.device, capture.processes)
    yield "regenerate", _Shape.on(capture.device)
    yield "capture", whole
    if target.streaming is not None:
        yield "plan", _Shape.on(capture.device)
        yield "produce", whole
        if target.streaming.store.kind == "mooncake":
            yield "memory", _Shape()
    for entry in target.strategies.values():
        trained = _Shape.on(entry.training.device, entry.training.processes)
        yield "train", trained
        yield "evaluate", trained
        if entry.export.formats != []:
            yield "export", _Shape()
    if target.evaluation.serving.prompts > 0:
        yield "serve", _Shape.on(target.evaluation.serving.device)


def _ask(spec: LauncherSpec, shape: _Shape, registry: Registry) -> str | None:
    """Return what stands against a job of this shape; None if nothing is known."""
    if spec.kind == LOCAL:
        if spec.least_nodes == 1:
            return None
        return (
            f"launcher.nodes is {spec.nodes}, but kind local has this machine only: set it to 1, or choose another kind"
        )
    var = registry.resolve_var_folder()
    job = TorchJob("draftworks", nodes=spec.nodes, procs_per_node=shape.processes, gpus_per_node=shape.gpus)
    try:
        make_scheduler(spec).check(JobRequest(_NAME, job, {}, RunDir(var / "runs" / "check"), var / "check"))
    except DraftworksError as error:
        return str(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the schedulers of targets whether they would take their jobs.")
    parser.add_argument("registry", type=Path)
    parser.add_argument("targets", nargs="*")
    given = parser.parse_args()
    registry, found = Registry(given.registry), dict[str, list[str]]()
    for name in given.targets:
        try:
            found[name] = find_launcher_problems(registry.load_target(name), registry)
        except DraftworksError as error:
            found[name] = [str(error)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
