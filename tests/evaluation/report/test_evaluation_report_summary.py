"""Summaries of reports: read for a leaderboard, without importing what an evaluation needs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_toys import full_report, prompts, rungs_0_and_1

from draftworks.config.decoding import GREEDY
from draftworks.errors import StoreError
from draftworks.evaluation.labels import Exactness, LabelCounts
from draftworks.evaluation.ladder.measurement import LoopMeasurement
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import REPORT, ReportSummary, RungScore
from draftworks.storage.files import publish_json


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
