"""Reports: the same numbers in every form."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from draftworks.errors import StoreError
from draftworks.evaluation.report import MARKDOWN, PLOT, REPORT, TABLE, Report
from draftworks.evaluation.result import EvalResult


@pytest.fixture
def report() -> Report:
    def result(correct: tuple[float, ...], loss_weight: float) -> EvalResult:
        return EvalResult(30.0, loss_weight, 40, {"acc_corrects": correct, "acc_denoms": (10.0, 8.0)})

    drafts = {
        "trained": result((8.0, 4.0), 10.0),
        "untrained": result((1.0, 0.0), 10.0),
        "bigram": result((3.0, 2.0), 0.0),
    }
    return Report("tiny", "eagle3", "heldout", drafts, {"target_digest": "0123"})


def test_report_round_trip(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    assert Report.load(tmp_path) == report


def test_table_says_draft_rung_metric_and_accuracies(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    table = pd.read_parquet(tmp_path / TABLE).set_index("draft")
    assert list(table.index) == ["trained", "untrained", "bigram"]
    assert set(table["rung"]) == {1}
    assert set(table["metric"]) == {"simulated_acc_len"}
    assert table.loc["trained", "value"] == pytest.approx(0.8 + 0.8 * 0.5)
    assert table.loc["trained", ["acc_1", "acc_2"]].tolist() == [0.8, 0.5]
    assert pd.isna(table.loc["bigram", "avg_loss"])


def test_json_says_rung_and_metrics(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    values = json.loads((tmp_path / REPORT).read_text())
    assert (values["schema_version"], values["rung"], values["metric"]) == (1, 1, "simulated_acc_len")
    assert values["drafts"]["trained"]["metrics"]["eval/simulated_acc_len"] == pytest.approx(1.2)


def test_markdown_has_a_line_per_draft_and_explains_the_rung(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    text = (tmp_path / MARKDOWN).read_text()
    assert "| trained   |" in text
    assert "1.200" in text
    assert "nan" not in text
    assert "Rung 1" in text


def test_plot_is_a_picture(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    with Image.open(io.BytesIO((tmp_path / PLOT).read_bytes())) as picture:
        picture.verify()
        assert picture.format == "PNG"
        assert picture.width > 400


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 1}', '{"schema_version": 99}'])
def test_damaged_report_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text(content)
    with pytest.raises(StoreError, match=r"report\.json"):
        Report.load(tmp_path)
