"""Checks that the engines of a target can load its quantised checkpoint here: packages, GPUs, methods. Torch-free to import."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.preflight.findings import Findings
from draftworks.preflight.placement import runs_here
from draftworks.storage.installed import read_version
from draftworks.storage.words import shorten
from draftworks.targets.quantization import read_quantization
from draftworks.targets.registry import Registry
from draftworks.targets.weights import read_model_config, silence_transformers

_MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fp8", "mxfp8", "mxfp4", "bitnet"), ("accelerate",)),
    "aqlm": ("aqlm", "accelerate"),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("kernels", "accelerate"),
    "fbgemm_fp8": ("fbgemm_gpu", "accelerate"),
    "fp_quant": ("fp_quant",),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("flute", "fast_hadamard_transform", "accelerate"),
    "hqq": ("hqq",),
    "quark": ("quark",),
    "sinq": ("sinq",),
    "spqr": ("spqr_quant", "accelerate"),
    "torchao": ("torchao",),
    "vptq": ("vptq", "accelerate"),
}
"""Modules without which transformers 5.23 loads no checkpoint of a method (`validate_environment` of its quantizers).
It is asked itself too, but names one at a time."""
_PACKAGES = {"quark": "amd-quark", "flute": "flute-kernel"}
"""Packages whose name is not their module's."""
_OF_SGLANG = frozenset(
    (
        *("fp8", "mxfp8", "mxfp4", "blockwise_int8", "modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"),
        *("w8a8_int8", "w8a8_fp8", "w4afp8", "awq", "gptq", "bitsandbytes", "gguf", "compressed-tensors", "quark"),
        *("auto-round", "petit_nvfp4", "modelslim"),
    )
)
"""Methods that SGLang 0.5.23 loads (`sglang/srt/layers/quantization/__init__.py`)."""


@dataclass(frozen=True)
class _Obstacle:
    """Why a checkpoint cannot be loaded, and what removes that, if anything does."""

    reason: str
    remedy: str | None = None

    def describe(self, alternative: str) -> str:
        return f"{self.reason}: {alternative if self.remedy is None else f'{self.remedy}, or {alternative}'}"


def check_quantizer(target: TargetSpec, files: TargetFiles, registry: Registry, findings: Findings) -> None:
    """Check that a quantised target can be loaded where it has to: by the engine of capture, and by rung 4's."""
    method, backend = read_quantization(files), target.capture.backend
    if not method:
        return
    where = f"target {target.name}"
    obstacle = _find_obstacle(method, files) if backend == "hf" or target.evaluation.loop.prompts else None
    other = "backend sglang, which loads it" if method in _OF_SGLANG else "another backend"
    if obstacle is not None and backend == "hf":
        told = obstacle.describe(f"use {other}")
        _choose(target, registry, findings, "capture")(f"{where}: capture.backend hf: {told}")
    if obstacle is not None and target.evaluation.loop.prompts:
        told = obstacle.describe("set evaluation.loop.prompts: 0")
        _choose(target, registry, findings, "evaluate")(f"{where}: evaluation.loop: {told}")
    ours = backend == "sglang" or (backend == "sglang_server" and not target.capture.server.external)
    if ours and method not in _OF_SGLANG:
        findings.warning(
            f"{where}: capture.backend {backend}: quantised ({method}), which SGLang 0.5.23 does not know: use backend hf, or the "
            "checkpoint without quantisation"
        )


def _find_obstacle(method: str, files: TargetFiles) -> _Obstacle | None:
    """Return why transformers cannot load the checkpoint here; None if it can."""
    given = f"quantised ({method})"
    missing = [name for name in _MODULES.get(method, ()) if find_spec(name) is None]
    if missing:
        packages = " ".join(_PACKAGES.get(name, name.replace("_", "-")) for name in missing)
        return _Obstacle(f"{given}, which needs {', '.join(missing)}", f"pip install {packages}")
    told = _ask_transformers(files)
    return None if told is None else _Obstacle(f"{given}; transformers {read_version('transformers')} {told}")


def _ask_transformers(files: TargetFiles) -> str | None:
    """Return what transformers has against loading the checkpoint on this machine; None if nothing."""
    config = read_model_config(files)
    if isinstance(config, str):
        return None  # another check says that the family is unknown
    from transformers.quantizers.auto import get_hf_quantizer

    try:
        with silence_transformers():
            quantizer = get_hf_quantizer(copy.deepcopy(config), None, None, True, {})[0]
    except Exception as error:  # each quantizer raises errors of its own
        return f"says: {shorten(' '.join(str(error).split()), 80) or type(error).__name__}"
    if quantizer is None and getattr(config, "quantization_config", None) is not None:
        return "does not know it, and would take packed weights for plain ones"
    return None


def _choose(target: TargetSpec, registry: Registry, findings: Findings, program: str) -> Callable[[str], None]:
    """Return how to report what is missing: as an error where the program's jobs run on this machine."""
    return findings.error if runs_here(target, registry, program) else findings.warning
