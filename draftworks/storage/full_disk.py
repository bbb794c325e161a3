"""A full disk, whoever met it: Python, safetensors or Arrow, each with an error of its own."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from draftworks.errors import StoreError

_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_WORDS = ("No space left on device", "Disk quota exceeded")


def explain_full_disk(error: BaseException, folder: Path) -> StoreError | None:
    """What to tell a person if `error` is, or came from, a full disk; None for any other error.

    Args:
        folder: where the work writes, for an error that does not say which file it was at.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if getattr(cause, "errno", None) in _ERRNOS or any(words in str(cause) for words in _WORDS):
            place = Path(getattr(cause, "filename", None) or folder)
            return StoreError(
                f"{place}: the disk is full, or a quota is used up{_format_free_space(place)}. Make room and run it again: what was"
                " finished is kept, what was half written is not"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _format_free_space(place: Path) -> str:
    """Said only where it can be found out."""
    for folder in (place, *place.absolute().parents):
        try:
            return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free in {folder})"
        except OSError:
            continue
    return ""
