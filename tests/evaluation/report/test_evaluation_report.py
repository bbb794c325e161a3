"""Reports have the same numbers in every file, and a file that is not of a report is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_toys import full_report, prompts, rungs_0_and_1

from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.labels import LabelCounts
from draftworks.evaluation.ladder.measurement import DraftMeasurement
from draftworks.evaluation.ladder.statistics import paired_difference, summarize_acceptance
from draftworks.evaluation.report.findings import get_metric_name
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
from draftworks.evaluation.report.writing import save_report

RUNGS = {
    (2, 0.0): "rung2_block_acc_len",
    (3, 0.0): "rung3_walk_acc_len",
    (4, 0.0): "rung4_loop_acc_len_t0",
    (4, 0.7): "rung4_loop_acc_len_t0.7_greedy_draft",
}


@pytest.fixture
def report() -> Report:
    return full_report()


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    save_report(full_report(), folder)
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """`report`, in a folder of its own."""
    return shutil.copytree(saved_once, tmp_path / "saved")


ROUNDED = replace(full_report(), label_agreement=0.5, labels=LabelCounts(4, 2, 2), greedy_answers=True)


@pytest.mark.parametrize(
    "report", [full_report(), rungs_0_and_1(), ROUNDED], ids=["all rungs", "rungs 0 and 1", "rounded"]
)
def test_report_round_trip(report: Report, tmp_path: Path) -> None:
    save_report(report, tmp_path)
    assert Report.load(tmp_path) == report


def test_table_has_a_row_per_draft_and_rung(report: Report, saved: Path) -> None:
    table = pd.read_parquet(saved / TABLE)
    assert (table[["target", "strategy", "eval_set"]] == ["tiny", "eagle3", "heldout"]).all(axis=None)
    found = table[table["rung"] > 0].set_index(["draft", "metric"])["rung"].to_dict()
    of_trained = {("trained", name): rung for (rung, _), name in RUNGS.items()}
    simulated = {(draft, "simulated_acc_len"): 1 for draft in report.drafts}
    assert found == {**of_trained, **simulated, ("untrained", "rung3_walk_acc_len"): 3}


def test_table_by_hand(saved: Path) -> None:
    table = pd.read_parquet(saved / TABLE).set_index(["draft", "metric"])
    walk = table.loc[("trained", "rung3_walk_acc_len")]
    assert walk[["value", "prompts", "passes", "tokens_per_pass"]].tolist() == [9 / 6, 3, 6, 15 / 6]
    assert walk["low"] < walk["value"] < walk["high"]
    assert table.loc[("trained", "simulated_acc_len"), "value"] == pytest.approx(0.8 + 0.8 * 0.5)
    assert table.loc[("trained", "per_position_acc_2"), "value"] == 0.5
    loops = table[table["rung"] == 4]
    assert loops[["temperature", "speed_up"]].values.tolist() == [[0.0, 1.5], [0.7, 0.5]]


def test_json_has_every_draft_on_every_rung_with_its_interval(report: Report, saved: Path) -> None:
    values = json.loads((saved / REPORT).read_text())
    assert (values["schema_version"], values["draft_tokens"], values["label_agreement"]) == (2, 3, 1.0)
    for name, measured in report.drafts.items():
        draft = values["drafts"][name]
        assert draft["metrics"] == measured.result.metrics()
        counted = {entry["metric"]: entry["acceptance"] for entry in draft["rungs"] if entry["rung"] > 1}
        expected = {RUNGS[2, 0.0]: measured.blocks, RUNGS[3, 0.0]: measured.walk}
        expected |= {RUNGS[4, loop.decoding.temperature]: loop.prompts for loop in measured.loops}
        assert counted == {
            metric: summarize_acceptance(each, report.resampling).to_json() for metric, each in expected.items() if each
        }


def test_json_has_the_loops_with_their_speed_up_and_tokens_per_pass(saved: Path) -> None:
    greedy, sampled = json.loads((saved / REPORT).read_text())["drafts"]["trained"]["loops"]
    assert (greedy["temperature"], greedy["speed_up"], greedy["tokens_per_pass"]) == (0.0, 1.5, 15 / 6)
    assert (sampled["temperature"], sampled["speed_up"], sampled["tokens_per_pass"]) == (0.7, 0.5, 6 / 3)


def test_trained_draft_is_compared_on_the_walk_with_those_that_have_one(report: Report, saved: Path) -> None:
    [compared] = json.loads((saved / REPORT).read_text())["comparisons"]
    assert (compared["metric"], compared["draft"], compared["other"]) == (RUNGS[3, 0.0], "trained", "untrained")
    assert compared["difference"] == pytest.approx(9 / 6 - 1 / 12)
    walks = [report.drafts[name].walk for name in ("trained", "untrained")]
    assert compared["interval"]["low"] == paired_difference(*walks, resampling=report.resampling).interval.low


def test_prompts_can_be_compared_later(report: Report, saved: Path) -> None:
    trained, loaded = report.drafts["trained"], Report.load(saved).drafts
    assert (loaded["trained"].blocks, loaded["trained"].walk) == (trained.blocks, trained.walk)
    assert [loop.prompts for loop in loaded["trained"].loops] == [loop.prompts for loop in trained.loops]
    assert loaded["untrained"].walk == report.drafts["untrained"].walk


@pytest.mark.parametrize("rung", [0, 1, 5])
def test_a_rung_that_counts_no_prompts_has_no_name_for_them(rung: int) -> None:
    with pytest.raises(ConfigError, match=f"rung: expected 2, 3 or 4, found {rung}"):
        get_metric_name(rung)


def test_slices_of_the_walk_of_the_trained_draft(saved: Path) -> None:
    table = pd.read_parquet(saved / SLICES)
    assert table[["column", "value", "prompts", "passes", "accepted"]].values.tolist() == [
        ["task", "chat", 1, 3, 5],
        ["task", "code", 2, 3, 4],
        ["language", "en", 3, 6, 9],
    ]


def test_tables_without_rows_have_the_same_types(saved: Path, tmp_path: Path) -> None:
    without = tmp_path / "without"
    save_report(rungs_0_and_1(), without)
    for name in (PROMPTS, SLICES):
        empty, full = pd.read_parquet(without / name), pd.read_parquet(saved / name)
        assert empty.empty
        assert empty.dtypes.equals(full.dtypes)


def test_saved_again_leaves_no_picture_of_slices_that_are_gone(report: Report, saved: Path) -> None:
    assert (saved / SLICES_PLOT).exists()
    save_report(replace(report, columns=None), saved)
    kept = [REPORT, TABLE, PROMPTS, SLICES, DIFFERENCES, MARKDOWN, PLOT]
    assert sorted(path.name for path in saved.iterdir()) == sorted(kept)


def test_report_json_is_written_last(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds it finds the rest."""
    (tmp_path / SLICES_PLOT).mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        save_report(report, tmp_path)
    assert not (tmp_path / REPORT).exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ('{"schema_version": 2}', "damaged"),
        ('{"schema_version": 1}', "expected schema 2, found 1"),
        ('{"schema_version": 99}', "expected schema 2, found 99"),
    ],
)
def test_report_that_is_none_is_refused_by_name(content: str, reason: str, saved: Path) -> None:
    (saved / REPORT).write_text(content)
    with pytest.raises(StoreError, match=rf"report\.json: .*{reason}.*Evaluate the draft again"):
        Report.load(saved)


MISSING = {REPORT: "expected a file of an evaluation report, found none", PROMPTS: "cannot be read: No such file"}


@pytest.mark.parametrize("gone", MISSING)
def test_missing_file_is_named(gone: str, saved: Path) -> None:
    (saved / gone).unlink()
    with pytest.raises(StoreError, match=rf"{gone}: {MISSING[gone]}.*Evaluate the draft again"):
        Report.load(saved)


def test_prompts_of_another_report_are_refused(report: Report, saved: Path, tmp_path: Path) -> None:
    """As a crash between two files of a second save would leave them."""
    drafts = {**report.drafts, "trained": replace(report.drafts["trained"], walk=prompts([1], [1], [1]))}
    save_report(replace(report, drafts=drafts), tmp_path / "other")
    (tmp_path / "other" / PROMPTS).rename(saved / PROMPTS)
    with pytest.raises(
        StoreError, match=r"prompts\.parquet: altered: .* not the file that report\.json was published with"
    ):
        Report.load(saved)


def test_report_without_the_trained_draft_is_refused(report: Report) -> None:
    with pytest.raises(ConfigError, match="expected 'trained' among them, found bigram"):
        replace(report, drafts={"bigram": DraftMeasurement(report.drafts["bigram"].result)})


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_label_agreement_is_a_share(report: Report, share: float) -> None:
    with pytest.raises(ConfigError, match="label_agreement: expected a share between 0 and 1"):
        replace(report, label_agreement=share)
