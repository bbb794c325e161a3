"""Plots are valid PNG files, as large as their contents need."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from report_toys import full_report, rungs_0_and_1

from draftworks.evaluation.report.plots import plot_acceptance, plot_slices
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import PLOT, SLICES_PLOT
from draftworks.evaluation.report.writing import save_report

pytestmark = pytest.mark.usefixtures("pictures")


def opened(data: bytes) -> Image.Image:
    """Open a PNG and read every byte of it."""
    picture = Image.open(io.BytesIO(data))
    picture.load()
    assert picture.format == "PNG"
    return picture


def drawn(report: Report) -> Image.Image:
    return opened(plot_acceptance(report.drafts, report.draft_tokens, report.title))


def test_histogram_stands_beside_the_accuracies_where_there_is_a_walk() -> None:
    assert drawn(full_report()).width > 1.5 * drawn(rungs_0_and_1()).width > 600


def test_saved_report_has_its_pictures(tmp_path: Path) -> None:
    save_report(full_report(), tmp_path)
    for name in (PLOT, SLICES_PLOT):
        assert opened((tmp_path / name).read_bytes()).width > 400


@pytest.mark.filterwarnings("ignore:Glyph")  # the font that comes with matplotlib has no Chinese
@pytest.mark.parametrize("value", ["code", r"$\frac$", "$", "数学", "x" * 200])
def test_slices_may_have_any_name(value: str) -> None:
    table = pd.DataFrame(
        {
            "column": "task",
            "value": [value, "other", "without a pass"],
            "prompts": [3, 1, 1],
            "passes": [9, 2, 0],
            "micro": [1.5, 1.0, None],
            "low": [1.2, 1.0, None],
            "high": [1.9, 1.0, None],
        }
    )
    assert opened(plot_slices(table, "slices")).width < 1000
