"""What this machine computes with: GPUs, and bfloat16 instructions of its processor. Torch-free.

PyTorch's products of bfloat16 take a quarter to a third of float32's time on a processor with such instructions, and four
to six times as long on one without.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from draftworks.storage.installed import read_version

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
