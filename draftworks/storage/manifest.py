"""Manifest of a folder: names, sizes and digests of its files, recorded once and compared later. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.storage.identity import file_digest
from draftworks.storage.regular_files import require_file


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of a file when it was written; `bytes` is None if the size was not recorded."""

    bytes: int | None
    digest: str


@dataclass(frozen=True)
class FileManifest:
    """Records of files, by path relative to their folder, and the function that computed their digests."""

    files: Mapping[str, FileRecord]
    digest_of: Callable[[Path], str] = file_digest

    @classmethod
    def record(cls, folder: Path, names: Iterable[str], digest_of: Callable[[Path], str] = file_digest) -> FileManifest:
        """Record the files as they are now. Raises OSError for one that is not a regular file."""
        paths = {name: folder / name for name in names}
        return cls({name: FileRecord(path.stat().st_size, digest_of(path)) for name, path in paths.items()}, digest_of)

    @classmethod
    def of_digests(cls, digests: Mapping[str, str], digest_of: Callable[[Path], str] = file_digest) -> FileManifest:
        """A manifest that was stored as digests by name, without sizes."""
        return cls({name: FileRecord(None, digest) for name, digest in digests.items()}, digest_of)

    @property
    def digests(self) -> dict[str, str]:
        return {name: file.digest for name, file in self.files.items()}

    def find_damage(self, folder: Path, names: Iterable[str] | None = None, read: bool = True) -> str | None:
        """Return a description of the first file that differs from its record; None if there is none.

        Args:
            names: the files to compare; default all.
            read: compare digests too, not only sizes.
        """
        looked_at = self.files if names is None else names
        return next(
            filter(None, (self._find_file_damage(folder / name, self.files[name], read) for name in looked_at)), None
        )

    def require_intact(self, folder: Path, advice: str, names: Iterable[str] | None = None) -> None:
        """Raise StoreError, ending with `advice`, if a file (of `names`, or of all) differs from its record."""
        damage = self.find_damage(folder, names)
        if damage is not None:
            raise StoreError(f"{damage}. {advice}")

    def _find_file_damage(self, path: Path, file: FileRecord, read: bool) -> str | None:
        try:
            size = require_file(path).stat().st_size
            if file.bytes not in (None, size):
                return f"{path}: truncated or altered: expected {file.bytes} bytes, found {size} bytes"
            if read and (digest := self.digest_of(path)) != file.digest:
                return f"{path}: altered: expected digest {file.digest}, found {digest} ({size} bytes)"
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            return f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        return None


def list_files(folder: Path) -> list[str]:
    """Return the relative POSIX paths of all files in a folder and its subfolders, sorted by path components."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
