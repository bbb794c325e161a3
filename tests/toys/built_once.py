"""Folders that many tests begin from, made once for a state of the code.

A folder is kept below `var/tests` under a key of all that decides what is in it: the product, the registry, the helpers of the
tests, pinned versions, Python and the processor's instruction set. It is made under a lock and where it stays, since stored
features are named by their place; its list of files is written last, and each process that asks verifies it. Nobody changes it:
tests copy. While a process that asked lives, it stays; of the others, what was not used for longest goes when all of them exceed
`MAX_BYTES`.

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "var" / "tests"
MAX_BYTES = 2 << 30
FILES = "files.json"
DECIDING = ("draftworks", "spec_assets", "resources", "jobs", "sensors", "registry", "tests/toys")
PINS = ("constraints.txt", "pyproject.toml")


def find_or_make(name: str, make: Callable[[Path], None], cache: Path = CACHE) -> Path:
    """Return the folder `name`; `make` fills it first if no sound one is kept.

    Raises:
        OSError: it was changed while another process uses it.
    """
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / f"{digest_code()[:16]}-{name}"
    with _open_lock(kept, "making") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        if not _is_sound(kept):
            _remove_unused(kept)
            _make(kept, make)
            _drop_oldest(cache, kept)
        os.utime(kept)
        use = _open_lock(kept, "use")
        fcntl.flock(use, fcntl.LOCK_SH)
        _in_use.append(use)
    return kept / "folder"


_in_use: list[IO[str]] = []
"""Locked until this process ends."""


def _open_lock(kept: Path, what: str) -> IO[str]:
    return open(kept.with_name(f"{kept.name}.{what}"), "a")


@functools.cache
def digest_code() -> str:
    """Return a digest of what decides what tests make."""
    import torch

    found = hashlib.sha256()
    conftests = (path for path in ROOT.glob("tests/**/conftest.py"))
    files = (path for room in DECIDING for path in (ROOT / room).rglob("*"))
    for path in sorted({*conftests, *files, *(ROOT / name for name in PINS)}):
        if path.is_file() and path.suffix not in (".pyc", ".gguf"):
            found.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    machine = (platform.python_version(), torch.__version__, torch.backends.cpu.get_cpu_capability(), _list_flags())
    return hashlib.sha256(f"{found.hexdigest()}{machine}".encode()).hexdigest()


def _list_flags() -> str:
    """What the processor can: libraries choose their kernels, and so the rounding, by more than torch's own name for it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _make(kept: Path, make: Callable[[Path], None]) -> None:
    (kept / "folder").mkdir(parents=True)
    make(kept / "folder")
    new = kept / f"{FILES}.new"
    new.write_text(json.dumps(_digest_files(kept / "folder")))
    new.rename(kept / FILES)


def _is_sound(kept: Path) -> bool:
    try:
        return json.loads((kept / FILES).read_text()) == _digest_files(kept / "folder")
    except (OSError, ValueError):
        return False


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
    """Remove folders that no process uses, the one not used for longest first, until all fit `MAX_BYTES`."""
    folders = sorted((each for each in cache.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime)
    sizes = {each: sum(path.stat().st_size for path in each.rglob("*") if path.is_file()) for each in folders}
    for folder in folders:
        if sum(sizes.values()) <= MAX_BYTES:
            return
        with _open_lock(folder, "making") as making, suppress(OSError):
            if folder != kept:
                fcntl.flock(making, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_unused(folder)
                del sizes[folder]


def _remove_unused(folder: Path) -> None:
    """Remove a folder. Raises OSError if a process uses it."""
    with _open_lock(folder, "use") as use:
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(f"{folder}: a test has changed it, and another process uses it") from error
        shutil.rmtree(folder, ignore_errors=True)
