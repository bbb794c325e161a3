"""Modules of a release of vLLM, taken out of its wheel; the wheel itself is not kept."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONFIG_MODULES = (
    "vllm/transformers_utils/config.py",
    "vllm/transformers_utils/configs/speculators/algos.py",
    "vllm/transformers_utils/configs/speculators/base.py",
)


def fetch_modules(version: str, folder: Path, modules: Sequence[str] = CONFIG_MODULES) -> Path:
    """Download the newest wheel of a release (0.33) from the package index, and return a folder with modules of it."""
    package = folder / "package"
    package.mkdir()
    with _open_wheel(version, folder) as archive:
        for module in modules:
            (package / Path(module).name).write_bytes(archive.read(module))
    return package


def fetch_package(version: str, folder: Path) -> Path:
    """Download a release as `fetch_modules` does, and return a folder to import `vllm` from: what is written in Python, as a
    build for CPUs."""
    package = folder / "package"
    with _open_wheel(version, folder) as archive:
        archive.extractall(package, [each for each in archive.namelist() if each.endswith((".py", ".json"))])
    record = package / f"vllm-{version}.0+cpu.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}.0+cpu\n")
    return package


@contextmanager
def _open_wheel(version: str, folder: Path) -> Iterator[zipfile.ZipFile]:
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(wheels), f"vllm=={version}.*"], check=True)
    [wheel] = wheels.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        yield archive
    wheel.unlink()
