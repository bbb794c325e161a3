"""Samples that a streamed draft went on without: the plan of its features is corrected, and its page lists them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftworks.data.rejected import KEPT_REASONS, RejectedSample, read_rejected, write_rejected
from draftworks.storage.artifacts import Artifact, BuildResult
from draftworks.storage.identity import digest
from resources.workspace import Workspace
from spec_assets.metadata import format_table

LEFT_OUT = "left_out_samples"
"""Key of the reasons of samples that could not be captured, by sample id, as `draftworks.programs.train` reports it."""


def copy_plan(source: Path, folder: Path) -> Path:
    """Copy a planned set for a stream, unless an earlier attempt has; it stays as it is when the plan is corrected."""
    if not folder.exists():
        staging = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(source, staging)
        staging.rename(folder)
    return folder


def settle_features(
    workspace: Workspace, planned: Artifact, plan: Path | None, streams: Iterable[str], report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what has changed in a draft's identity if its stream went on without samples; correct the planned set.

    Args:
        plan: the stream's copy of the planned set.
        streams: names of the streams that the draft reads.
    """
    left_out = report.get(LEFT_OUT)
    if not left_out or plan is None:
        return {}
    from draftworks.features.manifest import read_feature_set

    used = read_feature_set(plan).leave_out(left_out)
    _correct_plan(workspace, planned, left_out)
    return {"features": digest({name: used.stream_versions[name] for name in streams})}


def describe_left_out(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata of a streamed training that went on without some samples: how many, and why."""
    left_out = summary.get(LEFT_OUT, {})
    if not left_out:
        return {}
    return {
        "failed_samples": len(left_out),
        LEFT_OUT: format_table(("sample", "reason"), left_out.items(), KEPT_REASONS),
    }


def _correct_plan(workspace: Workspace, planned: Artifact, left_out: Mapping[str, str]) -> None:
    """Publish the planned features again without samples that could not be captured, unless another plan is newer.

    Their content version is then that of a stored set without them, and other drafts need not find them again.
    """
    from draftworks.data.conversations import QUARANTINE_FILE
    from draftworks.features.manifest import read_feature_set, write_feature_set

    current = workspace.artifacts.load_current(planned.asset, planned.target)
    if current.path != planned.path:
        return

    def build(out: Path) -> BuildResult:
        found = read_feature_set(current.path)
        manifest = found.leave_out(left_out)
        write_feature_set(out, manifest.refs, manifest.identity, manifest.streams, manifest.store)
        known = current.path / QUARANTINE_FILE
        before = read_rejected(known) if known.exists() else []
        present = {ref.sample_id for ref in found.refs}
        new = [RejectedSample(*each) for each in left_out.items() if each[0] in present]
        write_rejected(out / QUARANTINE_FILE, [*before, *new])
        figures = {
            "data_version": manifest.data_version,
            "samples": manifest.samples,
            "tokens": manifest.tokens,
            "stream_versions": manifest.stream_versions,
            "bytes": manifest.nbytes,
            "failed_samples": len(before) + len(new),
        }
        return BuildResult(manifest.data_version, {**current.summary, **figures})

    workspace.artifacts.obtain(current.asset, current.target, current.identity, build, start_over=True)
