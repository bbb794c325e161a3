"""Defaults of a target's entry that its model or this machine cannot have, replaced by those that they can. Torch-free.

Only what the entry leaves out is replaced; what it says stands, and is refused by the checks if it does not fit. It happens
once, when an entry is loaded, before any identity is computed: run files, records and identities hold the values that were
chosen, and no program chooses again on the machine on which it happens to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from draftworks.config.base import Dtype
from draftworks.config.launchers import LOCAL, LauncherSpec
from draftworks.config.registry_files import CaptureSpec, StrategyEntry, TargetSpec, TrainingSpec
from draftworks.config.service import ServingSpec
from draftworks.config.strategies import TargetSizes, resolve_strategy
from draftworks.errors import DraftworksError
from draftworks.storage.files import read_json
from draftworks.storage.identity import read_version
from draftworks.targets.gguf_header import is_gguf
from draftworks.targets.gguf_model import read_gguf_sizes

DEVICES, PROCESSORS = Path("/dev"), Path("/proc/cpuinfo")
_OTHER_DRIVERS = ("kfd", "dxg", "nvgpu", "nvhost-gpu", "nvmap")
"""Devices by which PyTorch may find a GPU under `cuda` where there is no `nvidia0`: ROCm's, WSL's and Jetson's."""
_FLAGS = ("flags", "features")
"""Keys of a processor's abilities in /proc/cpuinfo: those of x86 and Arm."""
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Abilities with which oneDNN multiplies bfloat16 in hardware: AVX512-BF16, AMX, and Arm's."""
_CPU_BUILD = "+cpu"


@dataclass(frozen=True)
class Machine:
    """The devices of a machine.

    Attributes:
        gpus: of NVIDIA.
        other_gpu: whether it has one of another maker, or one that cannot be counted.
        bfloat16: whether its processor has instructions for bfloat16.
        cpu_only: whether the installed PyTorch is a build without GPUs.
    """

    gpus: int
    other_gpu: bool
    bfloat16: bool
    cpu_only: bool = False

    @property
    def uses_gpu(self) -> bool:
        """Whether `device: auto` is a GPU here."""
        return not self.cpu_only and (self.gpus > 0 or self.other_gpu)


def read_machine(devices: Path = DEVICES, processors: Path = PROCESSORS) -> Machine:
    """Return this machine.

    Args:
        devices: folder of its device files.
        processors: the kernel's description of its processors; without that file it counts as one without bfloat16.
    """
    gpus = sum(each.name[6:].isdigit() for each in devices.glob("nvidia[0-9]*"))
    other = any((devices / name).exists() for name in _OTHER_DRIVERS)
    return Machine(gpus, other, _has_bfloat16(processors), _is_cpu_build())


def describe_computation(dtype: str, device: str) -> str:
    """Return what a program's log says of its arithmetic; `device` is its kind, cpu or cuda."""
    slow = device == "cpu" and dtype == "bfloat16" and not read_machine().bfloat16
    remedy = ", which has no instructions for that: set compute_dtype to float32" if slow else ""
    return f"computed in {dtype} on {device}{remedy}"


@functools.cache
def _has_bfloat16(processors: Path) -> bool:
    """Whether the first processor of a machine has bfloat16 instructions; no more than it is read."""
    try:
        with processors.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, values = line.partition(":")
                if key.strip().lower() in _FLAGS:
                    return not _BFLOAT16.isdisjoint(values.split())
    except OSError:
        pass
    return False


def _is_cpu_build() -> bool:
    try:
        return read_version("torch").endswith(_CPU_BUILD)
    except PackageNotFoundError:  # of another environment's jobs nothing is known
        return False


FindLauncher = Callable[[str], LauncherSpec | None]
"""Returns the settings of a program's launcher; None if they are not known."""
_LOADS_TARGET = ("regenerate", "capture", "plan", "produce")
_DTYPE, _MAX_LENGTH, _MAX_NEW_TOKENS = "compute_dtype", "max_length", "max_new_tokens"


@dataclass(frozen=True)
class _ModelSizes:
    """Sizes that a config.json gives."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    context: int


def fit_defaults(spec: TargetSpec, folder: Path, find_launcher: FindLauncher) -> TargetSpec:
    """Return the entry with defaults that fit its model and this machine.

    Args:
        folder: of the model, or its GGUF file. Sizes of a model of the hub, and of one whose config.json does not give
            them, are not asked: its defaults stay as they are.
    """
    sizes = None if spec.is_hub else _read_file_sizes(folder) if is_gguf(folder) else _read_sizes(folder)
    fitted = spec if sizes is None else _fit_to_model(spec, sizes)
    return _fit_to_machine(fitted, find_launcher)


def _read_file_sizes(path: Path) -> _ModelSizes | None:
    try:
        found = read_gguf_sizes(path)
    except DraftworksError:
        return None  # who resolves the target says what is wrong with it
    return _ModelSizes(found.num_layers, found.hidden_size, found.vocab_size, found.context)


def _read_sizes(folder: Path) -> _ModelSizes | None:
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return None  # who resolves the target says what is wrong with it
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    own: dict[str, Any] = text if isinstance(text, dict) else config
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    values = [value for value in map(own.get, keys) if type(value) is int and value > 0]
    return _ModelSizes(*values) if len(values) == len(keys) else None


def _fit_to_model(spec: TargetSpec, sizes: _ModelSizes) -> TargetSpec:
    changes: dict[str, Any] = {}
    if _MAX_LENGTH not in spec.model_fields_set and sizes.context < spec.max_length:
        changes[_MAX_LENGTH] = sizes.context
        if _MAX_NEW_TOKENS not in spec.responses.model_fields_set and spec.responses.max_new_tokens >= sizes.context:
            changes["responses"] = spec.responses.model_copy(update={_MAX_NEW_TOKENS: max(1, sizes.context // 2)})
    max_length = changes.get(_MAX_LENGTH, spec.max_length)
    target = TargetSizes(sizes.num_layers, sizes.hidden_size, sizes.vocab_size, max_length)
    entries = {name: _fit_options(name, entry, target) for name, entry in spec.strategies.items()}
    if entries != spec.strategies:
        changes["strategies"] = entries
    return spec.model_copy(update=changes) if changes else spec


def _fit_options(name: str, entry: StrategyEntry, target: TargetSizes) -> StrategyEntry:
    options = resolve_strategy(name).fit_defaults(entry.options, target)
    return entry if options == entry.options else entry.model_copy(update={"options": options})


def _fit_to_machine(spec: TargetSpec, find_launcher: FindLauncher) -> TargetSpec:
    """Return the entry with dtypes that are fast where its jobs compute."""
    serving = spec.evaluation.serving
    open_entries = [name for name, entry in spec.strategies.items() if _leaves_open(entry.training)]
    serves = serving.prompts > 0 and _leaves_open(serving)
    captures = _leaves_open(spec.capture) and not spec.capture.server.external
    if not (open_entries or serves or captures):
        return spec
    place = _Place(read_machine(), find_launcher)
    changes: dict[str, Any] = {}
    if captures and place.lacks_bfloat16(spec.capture.device, *_list_capture_programs(spec)):
        changes["capture"] = _in_float32(spec.capture)
    slow = [name for name in open_entries if place.lacks_bfloat16(spec.strategies[name].training.device, "train")]
    if slow:
        trained = {
            name: entry.model_copy(update={"training": _in_float32(entry.training)}) if name in slow else entry
            for name, entry in spec.strategies.items()
        }
        changes["strategies"] = trained
    if serves and place.serves_on_cpu(serving):
        changes["evaluation"] = spec.evaluation.model_copy(update={"serving": _in_float32(serving)})
    return spec.model_copy(update=changes) if changes else spec


def _list_capture_programs(spec: TargetSpec) -> list[str]:
    return [name for name in _LOADS_TARGET if name != "regenerate" or spec.responses.endpoint is None]


@dataclass(frozen=True)
class _Place:
    """Where an entry's jobs run."""

    machine: Machine
    find_launcher: FindLauncher

    def lacks_bfloat16(self, device: str, *programs: str) -> bool:
        """Whether these programs compute on this machine's processor, and it has no instructions for bfloat16."""
        return not self.machine.bfloat16 and self._is_cpu(device) and all(map(self._runs_here, programs))

    def serves_on_cpu(self, serving: ServingSpec) -> bool:
        """Whether a draft is served on a processor, on which SGLang speculates in float32 only, and vLLM fastest."""
        return serving.device == "cpu" or (self._is_cpu(serving.device) and self._runs_here("serve"))

    def _is_cpu(self, device: str) -> bool:
        return device == "cpu" or (device == "auto" and not self.machine.uses_gpu)

    def _runs_here(self, program: str) -> bool:
        launcher = self.find_launcher(program)
        return launcher is not None and launcher.kind == LOCAL and launcher.nodes == 1


def _leaves_open(section: Any) -> bool:
    return _DTYPE not in section.model_fields_set


def _in_float32(section: Any) -> Any:
    chosen: Dtype = "float32"
    return section.model_copy(update={_DTYPE: chosen})


def describe_fitted(written: TargetSpec, fitted: TargetSpec) -> list[str]:
    """Return a line for each default of an entry that was replaced, with the reason; `written` is without replacements."""
    found = _describe_sizes(written, fitted)
    before, now = _list_computing(written), _list_computing(fitted)
    found += [
        f"{key}.{_DTYPE}: {now[key].compute_dtype}, as device {now[key].device} is a CPU without bfloat16 instructions "
        f"(AVX512-BF16, AMX) here: set it where other machines share results"
        for key in now
        if before[key].compute_dtype != now[key].compute_dtype
    ]
    serving = fitted.evaluation.serving
    if written.evaluation.serving.compute_dtype != serving.compute_dtype:
        found.append(
            f"evaluation.serving.{_DTYPE}: {serving.compute_dtype}, as SGLang speculates on a CPU in nothing else"
        )
    return found


def _list_computing(spec: TargetSpec) -> dict[str, CaptureSpec | TrainingSpec]:
    """Return the sections whose dtype a processor may decide, by their keys."""
    trained = {f"strategies.{name}.training": entry.training for name, entry in spec.strategies.items()}
    return {"capture": spec.capture, **trained}


def _describe_sizes(written: TargetSpec, fitted: TargetSpec) -> list[str]:
    found: list[str] = []
    if written.max_length != fitted.max_length:
        found.append(f"max_length: {fitted.max_length}, the model's context, which is below the default")
    if written.responses.max_new_tokens != fitted.responses.max_new_tokens:
        found.append(f"responses.max_new_tokens: {fitted.responses.max_new_tokens}, half of that")
    alike: dict[str, list[str]] = {}
    for name, entry in fitted.strategies.items():
        before: Mapping[str, Any] = written.strategies[name].options
        lowered = ", ".join(f"{key} {value}" for key, value in entry.options.items() if key not in before)
        if lowered:
            alike.setdefault(lowered, []).append(name)
    found += [
        f"strategies: options of {', '.join(names)}: {lowered}, as the model is too small for the default"
        for lowered, names in alike.items()
    ]
    return found
