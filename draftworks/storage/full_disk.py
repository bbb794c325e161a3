"""One error for a full disk, whichever library met it: Python, safetensors and Arrow each raise their own."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from draftworks.errors import StoreError

_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_WORDS = ("No space left on device", "Disk quota exceeded")


def explain_full_disk(error: BaseException, folder: Path) -> StoreError | None:
    """Return a StoreError for the user if `error` was caused by a full disk or quota; None for any other error.

    Args:
        folder: the output folder, named if the error does not contain a file name.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if getattr(cause, "errno", None) in _ERRNOS or any(words in str(cause) for words in _WORDS):
            place = Path(getattr(cause, "filename", None) or folder)
            return StoreError(
                f"{place}: the disk is full, or a quota is used up{_format_free_space(place)}. Make room and run it again:"
                " finished work is kept, half-written files are not"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _format_free_space(place: Path) -> str:
    """Return the free space around `place` as text; empty if it cannot be read."""
    for folder in (place, *place.absolute().parents):
        try:
            return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free in {folder})"
        except OSError:
            continue
    return ""
