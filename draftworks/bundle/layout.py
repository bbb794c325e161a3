"""Writes a bundle: an OCI image layout (image-spec 1.1) or a plain folder, both with the same manifest and digest.

    oci-layout, index.json, blobs/sha256/…    the layout: a layer for each file, titled by its path in the bundle
    manifest.json, bundle.json, FORMAT/…      the folder: the manifest, byte for byte, and the files under their paths

Equal files and description give equal bytes, so an equal digest: that of the manifest. Each file is read once, to compute
its digest, while it is copied; where it may be linked, it is not written at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from draftworks.errors import ConfigError, StoreError
from draftworks.storage.artifacts import Artifact
from draftworks.storage.files import open_regular, publish_folder

LAYOUT, INDEX, BLOBS = "oci-layout", "index.json", PurePosixPath("blobs/sha256")
MANIFEST, DESCRIPTION = "manifest.json", "bundle.json"
SHA256 = "sha256:"
ARTIFACT_TYPE = "application/vnd.draftworks.draft.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
DESCRIPTION_TYPE = "application/vnd.draftworks.bundle.v1+json"
TITLE = "org.opencontainers.image.title"
REF_NAME = "org.opencontainers.image.ref.name"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
"""An image's, since tools that read images alone, such as skopeo 1.9, inspect nothing else; its labels say what it is."""
TYPES = {".json": "application/json", ".md": "text/markdown"}
OTHER_TYPE = "application/octet-stream"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class BundleFile:
    """A file that goes into a bundle.

    Attributes:
        name: its path there.
        source: where it is.
        begin: of its SHA-256 in hexadecimal, by the record of the result that it is of.
    """

    name: str
    source: Path
    begin: str


@dataclass(frozen=True)
class Blob:
    """Content by its digest, `sha256:` and 64 hexadecimal digits."""

    digest: str
    nbytes: int

    @classmethod
    def of(cls, content: bytes) -> Blob:
        return cls(SHA256 + hashlib.sha256(content).hexdigest(), len(content))

    def to_json(self, media_type: str, **more: Any) -> dict[str, Any]:
        """Return its descriptor."""
        return {"mediaType": media_type, "digest": self.digest, "size": self.nbytes, **more}


@dataclass(frozen=True)
class WrittenBundle:
    """A bundle that was written; `digest` is that of its manifest."""

    digest: str
    files: int
    nbytes: int


def list_export_files(export: Artifact) -> list[BundleFile]:
    """Return the files of an export, by its record."""
    return [BundleFile(name, export.path / name, begin) for name, begin in sorted(export.files.items())]


def write_layout(out: Path, files: Sequence[BundleFile], description: Mapping[str, Any], link: bool) -> WrittenBundle:
    """Fill the empty folder `out` with an OCI layout.

    Args:
        link: files may be links to the sources where the file system has them; whoever changes one changes both.

    Raises:
        StoreError: a file is not as its record says, or is no file; or its name would lead out of the bundle.
    """
    blobs = out / BLOBS
    blobs.mkdir(parents=True)
    found = {file.name: _take(file, blobs / ".taken", link, lambda blob: blobs / _name(blob)) for file in files}
    config, manifest = _build_config(description, found), _build_manifest(description, found)
    for content in (config, encode(description), manifest):
        (blobs / _name(Blob.of(content))).write_bytes(content)
    listed = Blob.of(manifest).to_json(
        MANIFEST_TYPE, artifactType=ARTIFACT_TYPE, annotations={REF_NAME: description["draft"]["digest"]}
    )
    (out / INDEX).write_bytes(encode({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [listed]}))
    (out / LAYOUT).write_bytes(encode({"imageLayoutVersion": "1.0.0"}))
    return _sum_up(manifest, found.values())


def write_folder(out: Path, files: Sequence[BundleFile], description: Mapping[str, Any], link: bool) -> WrittenBundle:
    """Fill the empty folder `out` with the files of a bundle under their own paths; see `write_layout`."""
    found = {}
    for file in files:
        place = out / require_inside(file.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        found[file.name] = _take(file, place, link, lambda _, place=place: place)
    manifest = _build_manifest(description, found)
    (out / DESCRIPTION).write_bytes(encode(description))
    (out / MANIFEST).write_bytes(manifest)
    return _sum_up(manifest, found.values())


def publish_bundle(out: Path, write: Callable[[Path], WrittenBundle]) -> WrittenBundle:
    """Have a bundle written to a folder that is complete or absent, and takes the place of a former bundle.

    Raises:
        ConfigError: there is something else at `out`, which is left alone.
    """
    place = out.absolute() if not out.is_symlink() else out.resolve()
    if place.exists() and not is_bundle(place) and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(
            f"{out}: expected no folder, an empty one or a bundle, found something else: it is not replaced"
        )
    with publish_folder(place) as staging:
        return write(staging)


def is_bundle(folder: Path) -> bool:
    """Whether a folder looks like a bundle, whole or altered."""
    is_layout = (folder / LAYOUT).is_file() and (folder / INDEX).is_file()
    return is_layout or ((folder / MANIFEST).is_file() and (folder / DESCRIPTION).is_file())


def encode(value: Any) -> bytes:
    """Return JSON whose bytes depend on the value alone."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def require_inside(name: str) -> str:
    """Return the path of a file in a bundle. Raises StoreError for one that is not plain, or leads out of it."""
    parts = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name and parts.as_posix() == name
    if not is_plain or not parts.parts or parts.is_absolute() or ".." in parts.parts:
        raise StoreError(f"{name!r:.100}: expected a plain path inside the bundle. Export the draft again")
    if name in (MANIFEST, DESCRIPTION):
        raise StoreError(f"{name!r}: the bundle has a file of its own by that name. Export the draft again")
    return name


def _list_layers(description: Mapping[str, Any], found: Mapping[str, Blob]) -> list[dict[str, Any]]:
    said = Blob.of(encode(description))
    layers = [said.to_json(DESCRIPTION_TYPE, annotations={TITLE: DESCRIPTION})]
    for name, blob in sorted(found.items()):
        media_type = TYPES.get(PurePosixPath(require_inside(name)).suffix, OTHER_TYPE)
        layers.append(blob.to_json(media_type, annotations={TITLE: name}))
    return layers


def _list_labels(description: Mapping[str, Any]) -> dict[str, str]:
    target, draft = description["target"], description["draft"]
    told = {"target": target["name"], "target-digest": target["digest"]}
    told |= {"strategy": draft["strategy"], "draft": draft["digest"]}
    return {f"vnd.draftworks.{name}": value for name, value in told.items()}


def _build_config(description: Mapping[str, Any], found: Mapping[str, Blob]) -> bytes:
    layers = [layer["digest"] for layer in _list_layers(description, found)]
    return encode(
        {
            "architecture": "unknown",
            "os": "unknown",
            "config": {"Labels": _list_labels(description)},
            "rootfs": {"type": "layers", "diff_ids": layers},
        }
    )


def _build_manifest(description: Mapping[str, Any], found: Mapping[str, Blob]) -> bytes:
    return encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": Blob.of(_build_config(description, found)).to_json(CONFIG_TYPE),
            "layers": _list_layers(description, found),
            "annotations": _list_labels(description),
        }
    )


def _sum_up(manifest: bytes, found: Iterable[Blob]) -> WrittenBundle:
    nbytes = [blob.nbytes for blob in found]
    return WrittenBundle(Blob.of(manifest).digest, len(nbytes), sum(nbytes))


def _name(blob: Blob) -> str:
    return blob.digest.removeprefix(SHA256)


def _take(file: BundleFile, staging: Path, link: bool, locate: Callable[[Blob], Path]) -> Blob:
    """Link or copy a file to `staging`, then rename it to where it belongs; its bytes are read once.

    Raises StoreError unless it is a regular file, and the one of its record.
    """
    with _open(file.source) as stream:
        if link and _link(file.source, staging, stream.fileno()):
            found = hashlib.file_digest(stream, "sha256")
        else:
            found = hashlib.sha256()
            with staging.open("xb") as copy:
                while piece := stream.read(_PIECE_BYTES):
                    found.update(piece)
                    copy.write(piece)
    blob = Blob(SHA256 + found.hexdigest(), staging.stat().st_size)
    if not _name(blob).startswith(file.begin):
        raise StoreError(
            f"{file.source}: altered: expected SHA-256 {file.begin}…, found {_name(blob)[: len(file.begin)]}…. Export the "
            "draft again"
        )
    place = locate(blob)
    if place != staging:
        place.unlink(missing_ok=True)  # equal content; of two links to one file a rename would leave both
        os.replace(staging, place)
    return blob


def _open(source: Path) -> BufferedReader:
    try:
        if source.is_symlink():
            raise OSError("expected a file, found a link")
        return open_regular(source)
    except OSError as error:
        raise StoreError(f"{source}: cannot be read: {error.strerror or error}. Export the draft again") from None


def _link(source: Path, staging: Path, opened: int) -> bool:
    """Make a hard link, and return whether it is one of the opened file; False where there can be none."""
    staging.unlink(missing_ok=True)
    try:
        os.link(source, staging, follow_symlinks=False)
    except OSError:
        return False  # another file system, or one without links
    if os.path.samestat(staging.stat(), os.fstat(opened)):
        return True
    staging.unlink()
    return False
