"""A report is read back as it was written, whole or as a summary; damaged ones are refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_toys import full_report, prompts, rungs_0_and_1

from draftworks.config.decoding import GREEDY
from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.labels import Exactness, LabelCounts
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.ladder.statistics import compare_paired, summarize_acceptance
from draftworks.evaluation.report.figures import get_metric_name
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
    ReportSummary,
    RungScore,
)
from draftworks.evaluation.report.writing import save_report
from draftworks.storage.files import publish_json

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
    assert compared["interval"]["low"] == compare_paired(*walks, resampling=report.resampling).interval.low


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


def summary_of(report: Report, folder: Path) -> ReportSummary:
    """Load the summary of a folder that has only report.json."""
    publish_json(folder / REPORT, report.to_json())
    return ReportSummary.load(folder)


def with_trained(**changes) -> Report:
    report = full_report()
    return replace(report, drafts={**report.drafts, "trained": replace(report.drafts["trained"], **changes)})


def test_summary_is_read_from_report_json_alone(tmp_path: Path) -> None:
    report = full_report()
    found = summary_of(report, tmp_path)
    assert (found.target, found.strategy, found.eval_set) == ("tiny", "eagle3", "heldout")
    assert (found.created, found.weights_digest) == (report.created, "4567")
    assert (found.draft_tokens, found.label_agreement, found.provenance) == (3, 1.0, report.provenance)
    assert found.simulated_acc_len == pytest.approx(1.2)


def test_who_wrote_the_answers_is_read_where_it_is_written(tmp_path: Path) -> None:
    """Reports of before have neither the counts nor whose answers they are."""
    before = summary_of(full_report(), tmp_path)
    assert (before.labels, before.greedy_answers, before.exactness) == (None, None, Exactness.EXACT)
    assert not {"labels", "greedy_answers"} & set(full_report().to_json())
    counts = LabelCounts(tokens=1000, differing=2, near_ties=1)
    now = summary_of(replace(full_report(), label_agreement=0.998, labels=counts, greedy_answers=True), tmp_path)
    assert (now.labels, now.greedy_answers, now.exactness) == (counts, True, Exactness.ROUNDING)


def test_score_has_interval_counts_and_speed_up(tmp_path: Path) -> None:
    [walk] = summary_of(full_report(), tmp_path).select_scores("trained", 3)
    assert (walk.value, walk.prompts, walk.passes, walk.tokens_per_pass, walk.confidence) == (1.5, 3, 6, 2.5, 0.95)
    assert walk.low < 1.5 < walk.high
    greedy, sampled = ReportSummary.load(tmp_path).select_scores("trained", 4)
    assert [(loop.temperature, loop.speed_up) for loop in (greedy, sampled)] == [(0.0, 1.5), (0.7, 0.5)]


def test_rungs_that_count_no_passes_have_a_value_alone(tmp_path: Path) -> None:
    [bigram] = summary_of(full_report(), tmp_path).select_scores("bigram", 1)
    assert bigram == RungScore("bigram", 1, "simulated_acc_len", pytest.approx(0.3 + 0.3 * 0.25))


LOOPS = full_report().drafts["trained"].loops
NO_PASS = prompts([], [])


@pytest.mark.parametrize(
    ("report", "metric"),
    [
        (full_report(), "rung4_loop_acc_len_t0"),
        (with_trained(loops=LOOPS[1:]), "rung3_walk_acc_len"),
        (with_trained(loops=()), "rung3_walk_acc_len"),
        (with_trained(loops=(), walk=NO_PASS), "rung2_block_acc_len"),
        (with_trained(loops=(LoopMeasurement(GREEDY, NO_PASS, 1.0, 1.0, 2, 2),)), "rung3_walk_acc_len"),
        (rungs_0_and_1(), "simulated_acc_len"),
    ],
)
def test_best_is_the_highest_greedy_rung_that_has_a_value(report: Report, metric: str, tmp_path: Path) -> None:
    assert summary_of(report, tmp_path).best.metric == metric


@pytest.mark.parametrize("damage", ["drafts", "trained", "created", "rungs"])
def test_damaged_report_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    values = full_report().to_json()
    {"trained": values["drafts"], "rungs": values["drafts"]["bigram"]}.get(damage, values).pop(damage)
    (tmp_path / REPORT).write_text(json.dumps(values))
    with pytest.raises(StoreError, match=rf"report\.json: .*damaged.*{damage}.*Evaluate the draft again"):
        ReportSummary.load(tmp_path)


def test_report_of_an_earlier_schema_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text('{"schema_version": 1, "target": "tiny"}')
    with pytest.raises(StoreError, match=r"report\.json: expected schema 2, found 1\. Evaluate the draft again"):
        ReportSummary.load(tmp_path)


def test_summary_needs_none_of_what_an_evaluation_needs() -> None:
    heavy = {"torch", "pandas", "numpy", "pyarrow", "matplotlib"}
    code = f"import sys, draftworks.evaluation.report.summary; sys.exit(bool({heavy!r} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
