"""Where a server finds the draft in service: one read of the record, then a folder that is named by its content."""

from __future__ import annotations

from pathlib import Path

from draftworks.errors import StoreError
from draftworks.service.record import ServedDraft
from draftworks.service.register import ServiceRegister
from draftworks.storage.artifacts import RECORD
from draftworks.storage.regular_files import read_json


def resolve_draft(var: Path, target: str, strategy: str, export_format: str | None = None) -> Path:
    """Return the folder of the draft in service in one export format; the only format by default.

    Raises:
        StoreError: no draft is in service, its folder is gone, or it was not exported in that format.
    """
    return locate_format(var, ServiceRegister(var, target, strategy).require().draft, export_format)


def locate_format(var: Path, draft: ServedDraft, export_format: str | None = None) -> Path:
    """Return the folder of one export format of a draft, see `resolve_draft`."""
    folder = require_present(var, draft)
    if export_format is None and len(draft.formats) == 1:
        [export_format] = draft.formats
    if export_format is None or export_format not in draft.formats:
        found = "none given" if export_format is None else f"found {export_format}"
        raise StoreError(f"draft {draft.digest}: format: expected one of {', '.join(sorted(draft.formats))}, {found}")
    return folder / export_format


def require_present(var: Path, draft: ServedDraft) -> Path:
    """Return the folder of a draft's export. Raises StoreError if it is not there any more, or is another one."""
    folder = var / draft.path
    try:
        version = read_json(folder / RECORD)["data_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"draft {draft.digest}: its export {folder} is not there any more, or not complete ({error}): was it pruned?"
        ) from None
    if version != draft.version:
        raise StoreError(f"draft {draft.digest}: {folder}: expected the export {draft.version}, found {version}")
    return folder
