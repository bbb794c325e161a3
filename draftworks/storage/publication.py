"""Results copied to object storage, for users who do not mount `var`. Torch-free.

    {url}/{asset}/{target}/{identity}-{content}/...              the files of a result, never changed
    {url}/{asset}/{target}/{identity}-{content}/artifact.json    its record with their digests, created last
    {url}/{asset}/{target}/current.json                          names the newest folder; swapped by condition

A folder without a record is not complete: an upload was interrupted, and the next run goes on with it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from draftworks.errors import StoreError
from draftworks.storage.artifacts import POINTER, RECORD, SCHEMA_VERSION, Artifact
from draftworks.storage.files import parse_json
from draftworks.storage.identity import digest
from draftworks.storage.object_store import ObjectStore

CONTENT_LENGTH = 12
SWAP_TRIES = 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedResult:
    """A result in object storage. `files` were uploaded now; 0 if it was there already."""

    url: str
    files: int


@dataclass(frozen=True)
class Publication:
    """The place in object storage that results are copied to."""

    objects: ObjectStore

    def require_writable(self) -> None:
        """Raise if nothing can be published, see `ObjectStore.require_writable`."""
        self.objects.require_writable()

    def publish(self, artifact: Artifact) -> PublishedResult:
        """Copy a result and let the pointer name it. Objects that exist are not copied again.

        Raises:
            ObjectStorageError: the storage cannot be reached, or refuses. The next call goes on.
            StoreError: the result is not whole.
        """
        problem = artifact.find_damage()
        if problem is not None:
            raise StoreError(f"{problem}. Materialize {artifact.asset} of target {artifact.target} again")
        results = self.objects.inside(f"{artifact.asset}/{artifact.target}")
        folder = f"{artifact.path.name}-{digest(artifact.files)[:CONTENT_LENGTH]}"
        uploaded = self._upload(artifact, results.inside(folder))
        self._point_to(results, folder, artifact)
        return PublishedResult(results.locate(folder), uploaded)

    def _upload(self, artifact: Artifact, place: ObjectStore) -> int:
        if place.inspect(RECORD) is not None:
            return 0
        for name in sorted(artifact.files):
            place.upload(name, artifact.path / name)
        # Of two processes that publish equal files, either one's record will do.
        place.create(RECORD, (artifact.path / RECORD).read_bytes())
        return len(artifact.files)

    def _point_to(self, results: ObjectStore, folder: str, artifact: Artifact) -> None:
        value = {
            "schema": SCHEMA_VERSION,
            "folder": folder,
            "identity": artifact.path.name,
            "data_version": artifact.data_version,
        }
        for _ in range(SWAP_TRIES):
            found = results.find(POINTER)
            if found is not None and _read_folder(found.content) == folder:
                return
            content = (json.dumps(value, indent=2) + "\n").encode()
            if results.swap(POINTER, content, None if found is None else found.version):
                return
            log.info("%s: another process has just changed it: looking again", results.locate(POINTER))
        raise StoreError(
            f"{results.locate(POINTER)}: other processes keep changing it. Publish {artifact.asset} of target "
            f"{artifact.target} from one deployment only"
        )


def _read_folder(content: bytes) -> str | None:
    """Return the folder that a pointer names; None if it is no pointer, and may be replaced."""
    try:
        return parse_json(content)["folder"]
    except (ValueError, KeyError, TypeError):
        return None
