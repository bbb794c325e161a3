"""Modules of a release of vLLM, taken out of its wheel; the wheel itself is not kept."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

CONFIG_MODULES = (
    "vllm/transformers_utils/config.py",
    "vllm/transformers_utils/configs/speculators/algos.py",
    "vllm/transformers_utils/configs/speculators/base.py",
)


def fetch_modules(version: str, folder: Path, modules: Sequence[str] = CONFIG_MODULES) -> Path:
    """Download the newest wheel of a release (0.33) from the package index, and return a folder with modules of it."""
    wheels, package = folder / "wheels", folder / "package"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(wheels), f"vllm=={version}.*"], check=True)
    [wheel] = wheels.glob("vllm-*.whl")
    package.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for module in modules:
            (package / Path(module).name).write_bytes(archive.read(module))
    wheel.unlink()
    return package
