"""No acceptance above temperature 0 is shown without its rule and its servers, nor promised where contexts are others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_toys import full_report, prompts, result

from draftworks.config.data import AnswersSampling
from draftworks.config.decoding import GREEDY, Decoding
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.report.markdown import render_report
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.sampled import describe_contexts, describe_rates, list_sampled_acceptance
from draftworks.evaluation.report.summary import REPORT, TABLE, ReportSummary
from draftworks.evaluation.report.writing import save_report
from draftworks.evaluation.result import EvalResult

BY_RULE = {rule: Decoding(0.7, rule) for rule in ("greedy_draft", "rejection")}
VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
BEFORE = Path(__file__).parents[2] / "storage" / "written_before" / "report"


def sampled_report(strategy: str = "dspark", answers: AnswersSampling | None = None) -> Report:
    """Rung 1 and 4 at 0.7 by two rules that two servers have unasked."""
    rates = {
        f"sampled_acceptance_{decoding.suffix}_{part}": values
        for decoding, sums in zip(BY_RULE.values(), ((5.0, 4.0), (9.0, 6.0)))
        for part, values in (("sums", sums), ("denoms", (10.0, 8.0)))
    }
    greedy = result((8.0, 4.0))
    measured = EvalResult(greedy.loss_sum, greedy.loss_weight, greedy.tokens, {**greedy.metric_sums, **rates})
    loops = [LoopMeasurement(GREEDY, prompts([2], [1]), 2.0, 3.0, 9, 9)]
    loops += [
        LoopMeasurement(decoding, prompts([accepted], [0]), 2.0, 3.0, 9, 9)
        for decoding, accepted in zip(BY_RULE.values(), (1, 3))
    ]
    trained = DraftMeasurement(measured, walk=prompts([2, 1], [0]), loops=tuple(loops))
    return replace(full_report(), strategy=strategy, drafts={"trained": trained}, columns=None, answers=answers)


def test_both_numbers_stand_side_by_side_with_their_servers() -> None:
    text = render_report(sampled_report())
    header = next(line for line in text.splitlines() if line.startswith("| draft"))
    for shown in (
        f"τ, simulated (rung 1), at temperature 0.7, by greedy_draft as {VLLM}",
        f"τ, simulated (rung 1), at temperature 0.7, by rejection as {SGLANG}",
        f"τ, loop (rung 4), at temperature 0.7, by greedy_draft as {VLLM}",
        f"τ, loop (rung 4), at temperature 0.7, by rejection as {SGLANG}",
        f"speed-up (temperature 0.7, rejection as {SGLANG})",
    ):
        assert shown in header
    assert f"`greedy_draft` ({VLLM}): the draft proposes its likeliest token" in text
    assert f"`rejection` ({SGLANG}): the draft draws" in text


@pytest.mark.parametrize("strategy", ["eagle3", "dspark", "of_mine"])
def test_wherever_a_temperature_above_0_stands_a_rule_does(strategy: str) -> None:
    """In every line and cell of report.md, entry of report.json and row of report.parquet."""
    report = sampled_report(strategy)
    for cell in re.split(r"\n|(?<!\\)\|", render_report(report)):
        if re.search(r"(_t|temperature )0\.7", cell):
            assert re.search("greedy_draft|rejection|stored answers", cell), cell
    entries = [entry for entry in report.to_json()["drafts"]["trained"]["rungs"] if entry["temperature"]]
    assert [entry["rule"] for entry in entries] == ["greedy_draft", "rejection"] * 2
    assert all(entry["servers"] and entry["rule"] in entry["metric"] for entry in entries)


def test_files_say_rule_and_servers_and_are_read_again(tmp_path: Path) -> None:
    report = sampled_report(answers=AnswersSampling(temperature=0.7))
    save_report(report, tmp_path)
    assert Report.load(tmp_path) == replace(report, columns=None)
    table = pd.read_parquet(tmp_path / TABLE).set_index("metric")
    assert table.loc["rung4_loop_acc_len_t0.7_rejection", ["rule", "servers"]].tolist() == ["rejection", SGLANG]
    assert table.loc["rung4_loop_acc_len_t0", ["rule", "servers"]].isna().all()
    summary = ReportSummary.load(tmp_path)
    assert [score.servers for score in summary.select_scores("trained", 4)] == ["", VLLM, SGLANG]
    assert summary.answers == AnswersSampling(temperature=0.7)
    assert summary.best.metric == "rung4_loop_acc_len_t0"


def test_a_report_of_before_rules_were_named_is_of_rejection(tmp_path: Path) -> None:
    summary = ReportSummary.load(BEFORE)
    _, sampled = summary.select_scores("trained", 4)
    assert (sampled.metric, sampled.rule, sampled.servers) == ("rung4_loop_acc_len_t0.7", "rejection", "")
    _, loop = Report.load(BEFORE).drafts["trained"].loops
    assert loop.decoding == Decoding(0.7, "rejection")
    assert len(loop.prompts) == 3


def test_sums_of_before_rules_were_named_are_of_rejection() -> None:
    old = EvalResult(1.0, 1.0, 1, {"sampled_acceptance_t0.7_sums": (5.0,), "sampled_acceptance_t0.7_denoms": (10.0,)})
    assert old.sampled_acc_lens == {Decoding(0.7, "rejection"): 0.5}


def test_metrics_are_listed_by_decoding_with_rung_1_beside_rung_4() -> None:
    metrics = sampled_report().drafts["trained"].metrics()
    greedy, rejection = list_sampled_acceptance("dspark", metrics)
    assert (greedy.decoding, greedy.servers, greedy.loop) == (BY_RULE["greedy_draft"], VLLM, 0.5)
    assert (rejection.decoding, rejection.servers, rejection.loop) == (BY_RULE["rejection"], SGLANG, 1.5)
    assert greedy.simulated == pytest.approx(0.5 + 0.5 * 0.5)
    assert rejection.simulated == pytest.approx(0.9 + 0.9 * 0.75)
    assert list_sampled_acceptance("dspark", full_report().drafts["untrained"].metrics()) == []


@pytest.mark.parametrize(
    ("answers", "said", "unsaid"),
    [
        (None, "not known to be this target's: it is no promise", "wrote"),
        (AnswersSampling(), "wrote greedily. Served at temperature 0.7 they are others: it is no promise", "not known"),
        (AnswersSampling(temperature=0.6), "wrote at temperature 0.6. Served at temperature 0.7 they are", "not known"),
        (AnswersSampling(temperature=0.7, top_p=0.9), "top-p 0.9. Served at temperature 0.7 they are others", "as is"),
        (AnswersSampling(temperature=0.7), "wrote at temperature 0.7, as is served there.", "no promise"),
    ],
)
def test_rung_1_is_promised_only_for_the_contexts_that_are_served(
    answers: AnswersSampling | None, said: str, unsaid: str
) -> None:
    text = describe_contexts(BY_RULE.values(), answers)
    assert said in text
    assert unsaid not in text
    assert text in render_report(sampled_report(answers=answers))


def test_a_greedy_report_speaks_of_no_rule() -> None:
    greedy = replace(full_report(), drafts={"trained": DraftMeasurement(result((8.0, 4.0)), walk=prompts([1], [0]))})
    assert describe_contexts((), AnswersSampling()) == ""
    for words in ("greedy_draft", "rejection", "stored answers", "Above temperature"):
        assert words not in render_report(greedy).split("* **Rung")[0]


def test_rates_and_tau_say_that_they_are_of_rejection_at_temperature_1() -> None:
    assert describe_rates("dspark", {"eval/tau": 1.0}) == f"tau: by rejection at temperature 1 ({SGLANG})"
    rates = describe_rates("eagle3", {"eval/conditional_acceptance_rate_0": 0.5})
    assert rates.startswith("conditional_acceptance_rate: by rejection at temperature 1 (")
    assert describe_rates("dflash", {"eval/accept_len": 1.0, "eval/taught": 1.0}) == ""


def test_json_of_a_greedy_report_is_what_it_was(tmp_path: Path) -> None:
    """Programs of users read it; only sampled entries have more."""
    before = json.loads((BEFORE / REPORT).read_text())["drafts"]["trained"]
    save_report(full_report(), tmp_path)
    now = json.loads((tmp_path / REPORT).read_text())["drafts"]["trained"]
    for part in ("rungs", "loops"):
        for old, new in zip(before[part], now[part], strict=True):
            assert list(old) == [name for name in new if name not in ("rule", "servers")]
            if not old["temperature"]:
                assert old.keys() == new.keys()
