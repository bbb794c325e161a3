"""Checks of this machine for the engine that runs a target: its own module, packages of quantised checkpoints. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.preflight.findings import Findings
from draftworks.preflight.placement import runs_here
from draftworks.targets.quantization import read_quantization
from draftworks.targets.registry import Registry

_QUANTIZERS = {
    "compressed-tensors": ("compressed_tensors",),
    "awq": ("gptqmodel",),
    "gptq": ("optimum", "gptqmodel"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "fp8": ("accelerate",),
}
"""Modules without which transformers loads no checkpoint of a quantisation; others are not judged."""


def check_custom_engine(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Check that the module of a user's own engine is there. It is not imported."""
    custom = target.capture.custom
    if custom is None:
        return
    module = custom.entry_point.partition(":")[0]
    if not _has_module(module):
        _choose(target, registry, findings, "capture")(
            f"target {target.name}: capture.custom.entry_point {custom.entry_point}: there is no module {module} here. Install "
            "its package, or correct the name"
        )


def check_quantizer(target: TargetSpec, files: TargetFiles, registry: Registry, findings: Findings) -> None:
    """Check that transformers can load a quantised target where it has to: for `backend: hf`, and for rung 4."""
    method = read_quantization(files)
    missing = [name for name in _QUANTIZERS.get(method, ()) if find_spec(name) is None]
    if not missing:
        return
    needs = f"the checkpoint is quantised ({method}), which needs {' and '.join(missing)}"
    packages = " ".join(name.replace("_", "-") for name in missing)
    if target.capture.backend == "hf":
        _choose(target, registry, findings, "capture")(
            f"target {target.name}: capture.backend hf: {needs}: pip install {packages}, or take another backend"
        )
    if target.evaluation.loop.prompts:
        _choose(target, registry, findings, "evaluate")(
            f"target {target.name}: evaluation.loop: {needs}: pip install {packages}, or set evaluation.loop.prompts: 0"
        )


def _choose(target: TargetSpec, registry: Registry, findings: Findings, program: str) -> Callable[[str], None]:
    """Return how to report what is missing: as an error where the program's jobs run on this machine."""
    return findings.error if runs_here(target, registry, program) else findings.warning


def _has_module(name: str) -> bool:
    """Whether a module can be found; its packages are not imported. Jobs find modules of their working folder too."""
    top, *rest = name.split(".")
    found = _find_top(top)
    for index in range(len(rest)):
        if found is None or found.submodule_search_locations is None:
            return False
        path = ".".join((top, *rest[: index + 1]))
        found = PathFinder.find_spec(path, list(found.submodule_search_locations))
    return found is not None


def _find_top(name: str) -> ModuleSpec | None:
    try:
        found = find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return None
    return found or PathFinder.find_spec(name, [os.getcwd()])
