"""Writing the files of a report: JSON, Parquet tables, Markdown, plots."""

from __future__ import annotations

from pathlib import Path

from draftworks.evaluation.report.markdown import render_report
from draftworks.evaluation.report.plots import plot_acceptance, plot_slices
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import (
    DIFFERENCES,
    MARKDOWN,
    PLOT,
    PROMPTS,
    REPORT,
    SLICES,
    SLICES_PLOT,
    TABLE,
)
from draftworks.evaluation.report.tables import (
    build_differences_table,
    build_prompts_table,
    build_slices_table,
    build_summary_table,
    publish_table,
    select_slices_to_show,
)
from draftworks.storage.artifacts import FileManifest
from draftworks.storage.files import publish_file, publish_json


def save_report(report: Report, folder: Path) -> None:
    """Write all files of a report into `folder`, each atomically, report.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    heading = {"target": report.target, "strategy": report.strategy, "eval_set": report.eval_set}
    publish_table(folder / TABLE, build_summary_table(heading, report.findings))
    publish_table(folder / PROMPTS, build_prompts_table(report.drafts))
    publish_table(folder / SLICES, build_slices_table(report.walk_slices))
    publish_table(folder / DIFFERENCES, build_differences_table(report.drafts))
    with publish_file(folder / MARKDOWN) as staging:
        staging.write_text(render_report(report), encoding="utf-8")
    with publish_file(folder / PLOT) as staging:
        staging.write_bytes(plot_acceptance(report.drafts, report.draft_tokens, report.title))
    _save_slices_plot(report, folder / SLICES_PLOT)
    written = FileManifest.record(folder, (TABLE, PROMPTS, SLICES, DIFFERENCES))
    publish_json(folder / REPORT, {**report.to_json(), "files": written.digests})


def _save_slices_plot(report: Report, path: Path) -> None:
    """Write the plot of the slices; without a pass to show, remove an old one."""
    shown, left_out = select_slices_to_show(report.walk_slices)
    if not (shown["passes"] > 0).to_numpy().any():
        path.unlink(missing_ok=True)
        return
    with publish_file(path) as staging:
        staging.write_bytes(plot_slices(shown, f"{report.title}{', the largest slices' if left_out else ''}"))
