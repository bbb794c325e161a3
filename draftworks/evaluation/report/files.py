"""The files of a report, and how the one that says what the others mean is read. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftworks.errors import DraftworksError, StoreError
from draftworks.storage.identity import file_digest
from draftworks.storage.regular_files import read_json

SCHEMA_VERSION = 2
REPORT, MARKDOWN = "report.json", "report.md"
TABLE, PROMPTS, SLICES = "report.parquet", "prompts.parquet", "slices.parquet"
DIFFERENCES = "differences.parquet"
PLOT, SLICES_PLOT = "acceptance.png", "slices.png"
EVALUATE_AGAIN = "Evaluate the draft again"


def read_report(folder: Path) -> dict[str, Any]:
    """The contents of report.json.

    Raises:
        StoreError: missing, damaged, or of another schema.
    """
    path = folder / REPORT
    with reading(path):
        values = read_json(path)
        version = values["schema_version"]
    if version != SCHEMA_VERSION:
        raise StoreError(f"{path}: expected schema {SCHEMA_VERSION}, found {version}. {EVALUATE_AGAIN}")
    return values


def checked_prompts(folder: Path) -> Path:
    """prompts.parquet, being the one that report.json was published with.

    Raises:
        StoreError: it is missing, altered, or of another report.
    """
    path = folder / PROMPTS
    values = read_report(folder)
    with reading(folder / REPORT):
        expected = values["files"][PROMPTS]
    with reading(path):
        found = file_digest(path)
    if found != expected:
        raise StoreError(
            f"{path}: expected the file that {REPORT} was published with ({expected}), found another or an altered one"
            f" ({found}). {EVALUATE_AGAIN}"
        )
    return path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with the contents of `path` is said with its name.

    Raises:
        StoreError: instead of what went wrong inside.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(f"{path}: expected a file of an evaluation report, found none. {EVALUATE_AGAIN}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DraftworksError) as error:
        raise StoreError(f"{path}: not of an evaluation report, or damaged ({error!r}). {EVALUATE_AGAIN}") from error
