"""The configuration modules of a release of vLLM, taken out of its wheel; the wheel itself is not kept."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOM = "vllm/transformers_utils"
FILES = {"config.py": "config.py", "algos.py": "configs/speculators/algos.py", "base.py": "configs/speculators/base.py"}


def fetch_config_modules(version: str, folder: Path) -> Path:
    """Download the newest wheel of a release (0.33) from the package index, and return a folder with `FILES` of it."""
    wheels, package = folder / "wheels", folder / "package"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(wheels), f"vllm=={version}.*"], check=True)
    [wheel] = wheels.glob("vllm-*.whl")
    package.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name, place in FILES.items():
            (package / name).write_bytes(archive.read(f"{ROOM}/{place}"))
    wheel.unlink()
    return package
