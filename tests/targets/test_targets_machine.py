"""What a machine computes with is read from its files, and agrees with what PyTorch says of this one."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from draftworks.targets.fitted_defaults import Machine, read_machine

PROCESSOR_FILES = {
    "AVX2": ("processor\t: 0\nvendor_id\t: x\nflags\t\t: fpu sse4_2 avx avx2 fma\n", False),
    "AVX512 without BF16": ("flags\t\t: avx2 avx512f avx512vl avx512_vnni\n", False),
    "AVX512-BF16": ("flags\t\t: avx2 avx512f avx512_bf16\n", True),
    "AMX": ("flags\t\t: avx2 avx512f amx_bf16 amx_tile amx_int8\n", True),
    "Arm": ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
    "older Arm": ("Features\t: fp asimd crc32\n", False),
    "of no known kind": ("cpu\t: POWER9\n", False),
}


@pytest.mark.parametrize(("text", "bfloat16"), PROCESSOR_FILES.values(), ids=PROCESSOR_FILES)
def test_bfloat16_is_an_ability_of_the_processor(tmp_path: Path, text: str, bfloat16: bool):
    processors = tmp_path / "cpuinfo"
    assert not read_machine(tmp_path, processors).bfloat16  # without the file
    processors = tmp_path / "named"
    processors.write_text(text)
    assert read_machine(tmp_path, processors).bfloat16 == bfloat16


def test_this_machine_is_as_pytorch_sees_it():
    """Where it can be asked: of Arm it says nothing."""
    wide = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert read_machine().bfloat16 == wide or platform.machine() != "x86_64"


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), False), (("nvidia0", "nvidiactl"), True), (("nvidiactl",), False), (("kfd",), True)],
)
def test_auto_is_a_gpu_where_pytorch_can_use_one(tmp_path: Path, names: tuple[str, ...], expected: bool, monkeypatch):
    for name in names:
        (tmp_path / name).touch()
    for version, usable in (("2.13.0+cu130", True), ("2.13.0", True), ("2.13.0+cpu", False)):
        monkeypatch.setattr("draftworks.targets.fitted_defaults.read_version", lambda package, found=version: found)
        assert read_machine(tmp_path).uses_gpu == (expected and usable)


def test_gpus_are_counted(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidia-uvm", "nvidia10"):
        (tmp_path / name).touch()
    assert read_machine(tmp_path, tmp_path / "none") == Machine(3, False, False, read_machine().cpu_only)
