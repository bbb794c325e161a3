"""Folders that many tests begin from, made once for a state of the code and copied for each process that asks.

A folder is kept below `var/tests` under a key of all that decides what is in it: the product, the registry, the helpers of the
tests, pinned versions, Python and the processor's instruction set. It is made under a lock, published by a rename, verified file
by file when it is copied, and made again if it is damaged. What was not used for longest goes when all of it exceeds `MAX_BYTES`.

A test of how a folder is made makes it; it does not ask for it here.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "var" / "tests"
MAX_BYTES = 2 << 30
FILES = "files.json"
DECIDING = ("draftworks", "spec_assets", "resources", "jobs", "sensors", "registry", "tests/toys")
PINS = ("constraints.txt", "pyproject.toml")


def take(name: str, make: Callable[[Path], None], into: Path, cache: Path = CACHE) -> Path:
    """Copy the folder `name` to `into`, which does not exist yet; `make` fills it first if no sound one is kept.

    Args:
        make: writes into the folder that it is given; nothing in it may name that folder.
    """
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / f"{digest_code()[:16]}-{name}"
    with _locked(cache / f"{kept.name}.lock"):
        if not _copy_sound(kept, into):
            _make(kept, make)
            _drop_oldest(cache, kept)
            if not _copy_sound(kept, into):
                raise OSError(f"{kept}: damaged as soon as it was made")
    return into


@functools.cache
def digest_code() -> str:
    """Return a digest of what decides what tests make."""
    import torch

    found = hashlib.sha256()
    conftests = (path for path in ROOT.glob("tests/**/conftest.py"))
    files = (path for room in DECIDING for path in (ROOT / room).rglob("*"))
    for path in sorted({*conftests, *files, *(ROOT / name for name in PINS)}):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    machine = (platform.python_version(), torch.__version__, torch.backends.cpu.get_cpu_capability(), _list_flags())
    return hashlib.sha256(f"{found.hexdigest()}{machine}".encode()).hexdigest()


def _list_flags() -> str:
    """What the processor can: libraries choose their kernels, and so the rounding, by more than torch's own name for it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(kept: Path, make: Callable[[Path], None]) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    new = kept.with_name(f"{kept.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    (new / "folder").mkdir(parents=True)
    make(new / "folder")
    (new / FILES).write_text(json.dumps(_digest_files(new / "folder")))
    new.rename(kept)


def _copy_sound(kept: Path, into: Path) -> bool:
    """Copy a kept folder; whether each file in the copy is what was made. Nothing is left of a copy that is not."""
    try:
        expected = json.loads((kept / FILES).read_text())
        shutil.copytree(kept / "folder", into, symlinks=True)
    except (OSError, ValueError):
        expected = None
    if expected is None or _digest_files(into) != expected:
        shutil.rmtree(into, ignore_errors=True)
        return False
    os.utime(kept)
    return True


def _digest_files(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"link to {path.readlink()}"
        elif path.is_file():
            with open(path, "rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _drop_oldest(cache: Path, kept: Path) -> None:
    """Remove folders that nobody is about to copy, the one not used for longest first, until all fit `MAX_BYTES`."""
    folders = sorted(
        (each for each in cache.iterdir() if (each / FILES).exists()), key=lambda each: each.stat().st_mtime
    )
    sizes = {each: sum(path.stat().st_size for path in each.rglob("*") if path.is_file()) for each in folders}
    for folder in folders:
        if sum(sizes.values()) <= MAX_BYTES:
            return
        if folder != kept and _remove_unless_locked(cache / f"{folder.name}.lock", folder):
            del sizes[folder]


def _remove_unless_locked(lock: Path, folder: Path) -> bool:
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        shutil.rmtree(folder)
        return True
