"""Where a GGUF file lies dequantised, in the workspace's store, and the start of the program that puts it there. Torch-free.

A file's folder is named by the digest of its content, so that it is dequantised once, whatever its name and however many
targets name it. In it are the files of any other model: the target's identity is their content. The code location and
sensors only look for it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.storage.identity import DigestNotCached, FileDigests, RememberedDigests, digest
from draftworks.storage.words import suggest
from draftworks.targets.gguf_header import SUFFIX, is_gguf, read_gguf_header
from draftworks.targets.gguf_model import count_bytes, describe_model
from draftworks.targets.gguf_tokenizer import require_tokenizer
from draftworks.targets.registry import Registry

GGUF = "gguf"
"""Folder of dequantised files, in `var`."""
REVISION = 1
"""Increased with each change that can alter what a file is dequantised to; folders of other revisions are not found."""
PROGRAM = "draftworks.programs.convert"
USER_ERROR = 2
_SPARE_BYTES = 100_000_000
"""Of vocabulary and free space, beside the weights."""


class NotConvertedError(ConfigError):
    """A GGUF file is not dequantised yet; whoever may pay for it calls `ensure_converted`.

    Attributes:
        identity: digest of the file's content and of how it would be dequantised.
    """

    def __init__(self, message: str, identity: str) -> None:
        super().__init__(message)
        self.identity = identity


def locate_gguf(model: str, registry: Registry, where: str) -> Path:
    """Return the path of a GGUF file of the registry. Raises ConfigError, with the closest name, if there is none."""
    path = registry.resolve_path(model)
    if not path.is_file():
        beside = [each.name for each in path.parent.glob(f"*{SUFFIX}")] if path.parent.is_dir() else []
        hint = suggest(path.name, beside)
        raise ConfigError(
            f"{where}: {path}: no such file{f'; {hint}' if hint else ''}. Correct the path, or fetch the file"
        )
    return path


def find_converted(spec: TargetSpec, registry: Registry, digests: FileDigests) -> Path:
    """Return the folder that a target's GGUF file was dequantised into.

    Raises:
        ConfigError: there is no such file.
        NotConvertedError: it is not dequantised yet.
    """
    where = f"target {spec.name}: model"
    path = locate_gguf(spec.model, registry, where)
    folder = _locate_folder(path, registry, digests)
    if not folder.is_dir():
        raise NotConvertedError(
            f"{where}: {path} is not dequantised yet: a run does it first, and so does draftworks check --target {spec.name}",
            folder.name,
        )
    return folder


def ensure_converted(spec: TargetSpec, registry: Registry, digests: FileDigests, say: Callable[[str], None]) -> None:
    """Dequantise a target's model into the store if it is a GGUF file that is not there, in a process of its own.

    Args:
        say: is given each line of its progress.

    Raises:
        ConfigError: the file is absent, of an architecture, kind or vocabulary that is not read, or the package `gguf` is
            missing.
        StoreError: the file is damaged, the disk has no room, or the process ended without a result.
    """
    if not names_gguf(spec):
        return
    path = locate_gguf(spec.model, registry, f"target {spec.name}: model")
    folder = _locate_folder(path, registry, digests)
    if folder.is_dir() and (spec.tokenizer is not None or (folder / "tokenizer.json").exists()):
        return
    header = read_gguf_header(path)
    if spec.tokenizer is None:
        require_tokenizer(header)
    if folder.is_dir():
        return
    needed = count_bytes(describe_model(header)) + _SPARE_BYTES
    if find_spec("gguf") is None:
        raise ConfigError(
            f"{path}: reading it needs the package gguf, which is not installed: pip install -e '.[gguf]'"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{folder.parent}: cannot be made, and {path} is dequantised there: {error.strerror}"
        ) from error
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise StoreError(
            f"{path}: takes {needed / 1e9:.1f} GB dequantised, and {folder.parent} has {free / 1e9:.1f} GB: make room"
        )
    _run_program(path, folder, say)


def identify_gguf(spec: TargetSpec, registry: Registry, digests: FileDigests) -> str:
    """Return the digest of a target's GGUF file and of how it is dequantised. Raises ConfigError if there is no such file."""
    return _locate_folder(locate_gguf(spec.model, registry, f"target {spec.name}: model"), registry, digests).name


def list_models(registry: Registry) -> frozenset[str] | None:
    """Return the folders that targets' GGUF files are dequantised into, whether they exist; None if that is not known.

    It is not known of a broken entry, an absent file, and one that has to be read for its digest.
    """
    digests = RememberedDigests(registry.resolve_var_folder() / "digests.json")
    found = set()
    for name in registry.list_targets_with(SUFFIX):
        try:
            spec = registry.read_target(name)
            if names_gguf(spec):
                found.add(identify_gguf(spec, registry, digests))
        except (DigestNotCached, DraftworksError):
            return None
    return frozenset(found)


def names_gguf(spec: TargetSpec) -> bool:
    """Whether a target's model is a GGUF file."""
    return not spec.is_hub and is_gguf(spec.model)


def _locate_folder(path: Path, registry: Registry, digests: FileDigests) -> Path:
    try:
        found = digests.of_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return registry.resolve_var_folder() / GGUF / digest([REVISION, found])


def _run_program(path: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Run the program to its end; its lines are passed on but for that of an error, which becomes the error here."""
    command = [sys.executable, "-m", PROGRAM, str(path), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = "it said nothing"
    try:
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            if not line.startswith("error: "):
                say(line)
            last = line or last
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code == USER_ERROR:
        raise StoreError(last.removeprefix("error: "))
    if code != 0 or not folder.is_dir():
        raise DraftworksError(f"{path}: its dequantisation ended with exit code {code}: {last}")
