"""The look at a target's drafts with which every run begins, remembered while nothing that it looks at has changed. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from draftworks.identity import digest
from draftworks.preflight.findings import Finding, Findings
from draftworks.preflight.plausible import judge_values
from draftworks.publishing import publish_json
from draftworks.runs import TargetFiles
from draftworks.specs import TargetSpec

REVISION = 1
"""Raised when the same target may be judged otherwise: what is remembered then no longer counts."""
_LIBRARIES = ("draftworks", "torch", "transformers")


def examine_drafts(target: TargetSpec, files: TargetFiles, remembered: Path) -> tuple[Finding, ...]:
    """Findings about values and drafts of a target. Verdicts without an error are kept, by content of entry and files.

    Args:
        remembered: folder of kept verdicts.
    """
    versions = [version(library) for library in _LIBRARIES]
    entry = [target.model_dump(mode="json"), files.model_dump(mode="json")]
    path = remembered / f"{digest([REVISION, versions, entry])}.json"
    known = _known(path)
    if known is not None:
        return known
    findings = Findings()
    judge_values(target, findings)
    from draftworks.preflight.drafts import check_drafts  # torch: only where there is something to find out

    check_drafts(target, files, findings)
    if not findings.errors:
        publish_json(path, [asdict(each) for each in findings.found])
    return tuple(findings.found)


def _known(path: Path) -> tuple[Finding, ...] | None:
    try:
        return tuple(Finding(**each) for each in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # it is found out again
