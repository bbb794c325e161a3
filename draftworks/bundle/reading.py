"""Reads a bundle back, whoever wrote or copied it, and says what is not as its manifest says. Hostile files are expected."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from draftworks.bundle.layout import (
    ARTIFACT_TYPE,
    BLOBS,
    DESCRIPTION,
    DESCRIPTION_TYPE,
    INDEX,
    LAYOUT,
    MANIFEST,
    MANIFEST_TYPE,
    SHA256,
    TITLE,
    Blob,
    require_inside,
)
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import open_regular, parse_json, read_bytes

MAX_SMALL_BYTES = 16 << 20
"""Of an index, a manifest, a description."""
ADVICE = "Fetch or make the bundle again"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Layer:
    """A file of a bundle by its manifest: its path there, and where its content lies in the folder."""

    name: str
    blob: Blob
    place: PurePosixPath


@dataclass(frozen=True)
class ReadBundle:
    """A bundle that was read, and is as its manifest says.

    Attributes:
        digest: of the manifest.
        description: see `draftworks.bundle.description`.
        names: paths of the files in it.
    """

    digest: str
    description: Mapping[str, Any]
    names: tuple[str, ...]
    nbytes: int


def read_bundle(folder: Path, expected: str | None = None, whole: bool = True) -> ReadBundle:
    """Read a bundle, an OCI layout or a plain folder, and compare it with its manifest.

    Args:
        expected: digest that it has to have; without it, a bundle that was altered in itself, manifest included, is not told.
        whole: compare the digest of every file; otherwise, of the large ones, the size alone.

    Raises:
        ConfigError: there is no bundle.
        StoreError: it is damaged, altered, or another one than expected.
    """
    is_layout = (folder / LAYOUT).exists()
    if not is_layout and not (folder / MANIFEST).exists():
        raise ConfigError(f"{folder}: expected a bundle, an OCI layout or a folder with {MANIFEST}, found neither")
    manifest = _read_listed_manifest(folder) if is_layout else _read(folder, PurePosixPath(MANIFEST))
    digest = Blob.of(manifest).digest
    if expected is not None and digest != expected:
        raise StoreError(f"{folder}: expected the bundle {expected}, found {digest}. {ADVICE}")
    layers = list(_list_layers(folder, manifest, is_layout))
    if is_layout:
        _compare(folder, _find_config(folder, manifest), whole=True)
    description = None
    for layer in layers:
        if layer.name == DESCRIPTION:
            description = _parse(folder, layer.place, _read(folder, layer.place))
        _compare(folder, layer, whole or layer.name == DESCRIPTION)
    if not isinstance(description, dict):
        raise StoreError(f"{folder}: expected a file {DESCRIPTION} in the bundle, found none. {ADVICE}")
    if not is_layout:
        _require_nothing_else(folder, layers)
    return ReadBundle(digest, description, tuple(one.name for one in layers), sum(one.blob.nbytes for one in layers))


def _read_listed_manifest(folder: Path) -> bytes:
    """Return the one manifest of a layout, after comparison with the index."""
    index = _parse(folder, PurePosixPath(INDEX), _read(folder, PurePosixPath(INDEX)))
    listed = index.get("manifests") if isinstance(index, dict) else None
    found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    ours = [one for one in found if one.get("mediaType") == MANIFEST_TYPE]
    if len(ours) != 1:
        raise StoreError(f"{folder / INDEX}: expected one manifest of an image, found {len(ours)}. {ADVICE}")
    blob = _parse_descriptor(folder, ours[0])
    place = _locate_blob(blob)
    content = _read(folder, place)
    if Blob.of(content) != blob:
        raise _describe_altered(folder / place, blob, Blob.of(content))
    return content


def _list_layers(folder: Path, content: bytes, is_layout: bool) -> Iterator[Layer]:
    """Yield the files that a manifest names. Raises StoreError for one that is not of a draft, or names odd paths."""
    manifest = _parse(folder, PurePosixPath(MANIFEST), content)
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if not isinstance(layers, list) or manifest.get("artifactType") != ARTIFACT_TYPE:
        raise StoreError(f"{folder}: expected a manifest of {ARTIFACT_TYPE}, found another one. {ADVICE}")
    seen = set()
    for each in layers:
        blob = _parse_descriptor(folder, each)
        annotations = each.get("annotations")
        name = annotations.get(TITLE) if isinstance(annotations, dict) else None
        if not isinstance(name, str) or name in seen:
            raise StoreError(
                f"{folder}: a layer of the manifest has no name, or that of another one: {name!r:.100}. {ADVICE}"
            )
        seen.add(name)
        if name != DESCRIPTION or each.get("mediaType") != DESCRIPTION_TYPE:
            require_inside(name)
        yield Layer(name, blob, _locate_blob(blob) if is_layout else PurePosixPath(name))


def _find_config(folder: Path, content: bytes) -> Layer:
    blob = _parse_descriptor(folder, _parse(folder, PurePosixPath(MANIFEST), content).get("config"))
    return Layer("config", blob, _locate_blob(blob))


def _parse_descriptor(folder: Path, value: Any) -> Blob:
    digest, size = (value.get("digest"), value.get("size")) if isinstance(value, dict) else (None, None)
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or type(size) is not int or size < 0:
        raise StoreError(f"{folder}: expected a descriptor with a SHA-256 and a size, found {value!r:.200}. {ADVICE}")
    return Blob(digest, size)


def _locate_blob(blob: Blob) -> PurePosixPath:
    return BLOBS / blob.digest.removeprefix(SHA256)


def _compare(folder: Path, layer: Layer, whole: bool) -> None:
    """Raise StoreError unless the file is as the manifest says."""
    path = _require_plain(folder, layer.place)
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != layer.blob.nbytes:
                raise StoreError(f"{path}: expected {layer.blob.nbytes:,} bytes, found {size:,}. {ADVICE}")
            if not whole:
                return
            found = Blob(SHA256 + hashlib.file_digest(stream, "sha256").hexdigest(), size)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}. {ADVICE}") from None
    if found != layer.blob:
        raise _describe_altered(path, layer.blob, found)


def _require_plain(folder: Path, place: PurePosixPath) -> Path:
    """Return the path of a file of a bundle. Raises StoreError if a link is on the way to it."""
    path = folder
    for part in place.parts:
        path = path / part
        if path.is_symlink():
            raise StoreError(f"{path}: expected a file or folder of the bundle, found a link. {ADVICE}")
    return path


def _require_nothing_else(folder: Path, layers: list[Layer]) -> None:
    """Raise StoreError for a file that the manifest does not name: a server may load it unseen."""
    known = {MANIFEST, *(str(one.place) for one in layers)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name not in known and not stat.S_ISDIR(path.lstat().st_mode):
            raise StoreError(f"{path}: the manifest does not name this file. {ADVICE}")


def _read(folder: Path, place: PurePosixPath) -> bytes:
    path = _require_plain(folder, place)
    try:
        return read_bytes(path, MAX_SMALL_BYTES)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}. {ADVICE}") from None


def _parse(folder: Path, place: PurePosixPath, content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise StoreError(f"{folder / place}: expected JSON: {error}. {ADVICE}") from None


def _describe_altered(path: Path, expected: Blob, found: Blob) -> StoreError:
    return StoreError(f"{path}: altered: expected {expected.digest}, found {found.digest}. {ADVICE}")
