"""The evaluation program: rung 4 is decoded once, and what the walk and the loop say differently is in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from draft_run_files import DFLASH_OPTIONS, RunFiles
from forked_ranks import ForkedRanks

from draftworks.capture.engines import hf
from draftworks.config.data import AnswersSampling
from draftworks.config.registry_files import EvaluationSpec, LoopSpec
from draftworks.config.run_files import EvaluateRun, TargetFiles
from draftworks.errors import StoreError
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import DIFFERENCES, ReportSummary
from draftworks.evaluation.rivals.measurement import Rivals
from draftworks.evaluation.rivals.names import RIVAL_MEANINGS
from draftworks.features.manifest import FeatureSetIdentity, read_feature_set, write_feature_set
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetFiles) -> RunFiles:
    torch.set_num_threads(1)
    files = RunFiles.make(tmp_path_factory.mktemp("trained"), tiny_target)
    train(files.train_run(), ProgramContext())
    return files


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that are loaded from here on."""
    names: list[str] = []
    load = hf.load_hf_engine

    def watched(target: TargetFiles, *arguments: Any) -> hf.HFTargetEngine:
        names.append(target.name)
        return load(target, *arguments)

    monkeypatch.setattr(hf, "load_hf_engine", watched)
    return names


def run_of(files: RunFiles, out: Path, cache: Path | None, slices: tuple[str, ...] = (), **loop: Any) -> EvaluateRun:
    spec = EvaluationSpec(loop=LoopSpec(**{"prompts": 2, **loop}), slices=list(slices), resamples=100)
    return files.evaluate_run(out=out, evaluation=spec, loop_cache=cache)


def loops_of(run: EvaluateRun):
    evaluate(run, ProgramContext())
    return Report.load(run.out).drafts["trained"].loops


def test_another_slice_column_decodes_nothing_again(trained: RunFiles, tmp_path: Path, loads: list[str]) -> None:
    first = loops_of(run_of(trained, tmp_path / "first", tmp_path / "loops"))
    assert loads == ["tiny"]
    again = run_of(trained, tmp_path / "again", tmp_path / "loops", slices=("length",))
    assert loops_of(again) == first
    assert loads == ["tiny"]
    assert f"{first[0].timing_context.date:%Y-%m-%d %H:%M} UTC" in (again.out / "report.md").read_text()


def test_what_costs_nothing_is_measured_once_for_all_drafts_of_an_eval_set(
    trained: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"strategy": "dflash", "options": DFLASH_OPTIONS, "vocab_mapping": None}
    train(trained.train_run(out=tmp_path / "block", **other), ProgramContext())
    shared = {
        "rival_cache": tmp_path / "rivals",
        "evaluation": EvaluationSpec(draft_tokens=2, loop=LoopSpec(prompts=0), resamples=100),
    }
    eagle3 = trained.evaluate_run(out=tmp_path / "eagle3", **shared)
    dflash = trained.evaluate_run(out=tmp_path / "dflash", draft=tmp_path / "block", **shared, **other)
    evaluate(eagle3, ProgramContext())
    monkeypatch.setattr(Rivals, "after", None)  # measured again it would fail
    evaluate(dflash, ProgramContext())
    first, again = (
        {name: Report.load(run.out).drafts[name].walk for name in RIVAL_MEANINGS} for run in (eagle3, dflash)
    )
    assert first == again
    assert len(list((tmp_path / "rivals").iterdir())) == 1


def test_a_column_that_the_eval_set_lacks_is_a_note(trained: RunFiles, tmp_path: Path) -> None:
    run = run_of(trained, tmp_path / "report", None, slices=("category", "length"), prompts=0)
    evaluate(run, ProgramContext())
    assert (
        "No slices by `category`: no sample of this eval set has such a column." in (run.out / "report.md").read_text()
    )
    assert set(pd.read_parquet(run.out / "slices.parquet")["column"]) == {"length", "runs_in_loop", "position"}
    assert Report.load(run.out).absent_columns == ("category",)


def test_only_a_temperature_that_is_new_is_decoded(
    trained: RunFiles, tmp_path: Path, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    [greedy] = loops_of(run_of(trained, tmp_path / "first", tmp_path / "loops"))
    capsys.readouterr()
    both = loops_of(run_of(trained, tmp_path / "both", tmp_path / "loops", temperatures=[0.7, 0.0]))
    assert [loop.decoding.temperature for loop in both] == [0.7, 0.0]
    assert both[1] == greedy
    assert loads == ["tiny", "tiny"]
    assert len(list((tmp_path / "loops").iterdir())) == 2
    told = [line for line in capsys.readouterr().out.splitlines() if "(rung 4)" in line]
    assert ["; cached, measured on " in line for line in told] == [False, True]


def test_rungs_1_and_4_are_measured_at_the_temperatures_that_servers_sample_at_by_their_rule(
    trained: RunFiles, tmp_path: Path, loads: list[str]
) -> None:
    run = run_of(trained, tmp_path / "sampled", tmp_path / "loops", temperatures=[0.0, 0.7], prompts=1)
    metrics = evaluate(run, ProgramContext())["drafts"]["trained"]
    summary = ReportSummary.load(run.out)
    greedy, sampled = summary.select_scores("trained", 1)
    assert (greedy.temperature, greedy.value, greedy.rule) == (None, summary.simulated_acc_len, None)
    assert (sampled.metric, sampled.temperature) == ("simulated_acc_len_t0.7_greedy_draft", 0.7)
    assert (sampled.rule, sampled.servers) == ("greedy_draft", "vLLM 0.33, SGLang 0.5.23")
    assert sampled.value == metrics["eval/simulated_acc_len_t0.7_greedy_draft"]
    rates = metrics["eval/sampled_acceptance_t0.7_greedy_draft"]
    assert all(0 < rate < 1 for rate in rates)
    assert sampled.value == pytest.approx(np.cumprod(rates).sum())
    assert [(loop.temperature, loop.rule) for loop in summary.select_scores("trained", 4)] == [
        (0.0, None),
        (0.7, "greedy_draft"),
    ]
    assert not summary.best.temperature


def test_every_rule_that_is_asked_for_is_measured_under_its_name_with_the_cuts(
    trained: RunFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers' contexts are greedy ones, and the report says that they are not what is served."""
    loop = {"temperatures": [0.7], "rules": ["greedy_draft", "rejection", "block"], "top_k": 50, "top_p": 0.95}
    run = run_of(trained, tmp_path / "rules", tmp_path / "loops", prompts=1, **loop)
    run = run.model_copy(update={"answers": AnswersSampling()})
    evaluate(run, ProgramContext())
    suffixes = [f"t0.7_k50_p0.95_{rule}" for rule in loop["rules"]]
    summary = ReportSummary.load(run.out)
    simulated = [score.metric for score in summary.select_scores("trained", 1)]
    assert simulated == ["simulated_acc_len", *(f"simulated_acc_len_{each}" for each in suffixes[:2])]
    assert [score.metric for score in summary.select_scores("trained", 4)] == [
        f"rung4_loop_acc_len_{each}" for each in suffixes
    ]
    assert len(list((tmp_path / "loops").iterdir())) == 3
    assert Report.load(run.out).answers == AnswersSampling()
    text = (run.out / "report.md").read_text()
    assert "this target wrote greedily" in text
    assert "no promise" in text
    told = [line for line in capsys.readouterr().out.splitlines() if "(rung 4)" in line]
    for rule, line in zip(loop["rules"], told, strict=True):
        assert f"temperature 0.7, top-k 50, top-p 0.95, by {rule} (" in line


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 5},
        {"max_length": 40},
        {"seed": 1},
        {"evaluation": EvaluationSpec(loop=LoopSpec(prompts=1))},
        {"evaluation": EvaluationSpec(loop=LoopSpec(prompts=2, compute_dtype="bfloat16"))},
        {"evaluation": EvaluationSpec(draft_tokens=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_decides_the_loop_makes_it_another(
    change: dict[str, Any], trained: RunFiles, tmp_path: Path, loads: list[str]
) -> None:
    run = run_of(trained, tmp_path / "first", tmp_path / "loops")
    loops_of(run)
    loops_of(run.model_copy(update={"out": tmp_path / "second", **change}))
    assert len(loads) == len(list((tmp_path / "loops").iterdir())) == 2


def test_damaged_measurement_is_made_anew_saying_so(
    trained: RunFiles, tmp_path: Path, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(trained, tmp_path / "report", tmp_path / "loops")
    [first] = loops_of(run)
    [entry] = (tmp_path / "loops").iterdir()
    entry.write_text(entry.read_text()[:-40])
    capsys.readouterr()
    [second] = loops_of(run)
    assert f"rung 4 is measured anew: {entry}" in capsys.readouterr().out
    assert (second.prompts, second.differences) == (first.prompts, first.differences)
    assert loads == ["tiny", "tiny"]
    assert loops_of(run) == (second,)
    assert len(loads) == 2


def test_without_a_cache_every_evaluation_decodes(trained: RunFiles, tmp_path: Path, loads: list[str]) -> None:
    for name in ("first", "second"):
        loops_of(run_of(trained, tmp_path / name, None))
    assert len(loads) == 2


def test_cache_that_cannot_be_used_is_refused_before_the_target_is_loaded(
    trained: RunFiles, tmp_path: Path, loads: list[str]
) -> None:
    (tmp_path / "loops").write_text("a file")
    with pytest.raises(StoreError, match="loops: expected the folder of the loop cache"):
        loops_of(run_of(trained, tmp_path / "report", tmp_path / "loops"))
    assert loads == []


def on_two_ranks(run: EvaluateRun, folder: Path) -> list[dict[str, int]]:
    """How many targets each rank loaded."""
    worker, run_file, log = (
        Path(__file__).with_name("evaluate_worker.py"),
        run.save(folder / "run.yaml"),
        folder / "log",
    )
    log.unlink(missing_ok=True)
    ranks = ForkedRanks.start(str(worker), [str(run_file)], 2, run.out.with_suffix(".ranks"), log)
    assert ranks.wait() == [0, 0], log.read_text()
    told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return sorted(told, key=lambda each: each["rank"])


def test_two_ranks_measure_once_and_read_what_one_of_them_kept(trained: RunFiles, tmp_path: Path) -> None:
    first, again = (run_of(trained, tmp_path / name, tmp_path / "loops") for name in ("first", "again"))
    assert on_two_ranks(first, tmp_path) == [{"rank": 0, "loads": 1}, {"rank": 1, "loads": 1}]
    assert on_two_ranks(again, tmp_path) == [{"rank": 0, "loads": 0}, {"rank": 1, "loads": 0}]
    [measured], [read] = (Report.load(run.out).drafts["trained"].loops for run in (first, again))
    assert read == measured
    [alone] = loops_of(run_of(trained, tmp_path / "alone", None))
    assert (alone.prompts, alone.differences) == (measured.prompts, measured.differences)


def test_every_difference_between_walk_and_loop_is_in_the_report(trained: RunFiles, tmp_path: Path) -> None:
    """Random answers: the loop says other tokens from the first or second on."""
    run = run_of(trained, tmp_path / "report", None, prompts=3)
    [loop] = loops_of(run)
    assert [one.whose for one in loop.differences] == ["target"] * 3
    table = pd.read_parquet(run.out / DIFFERENCES)
    assert table["sample_id"].tolist() == [one.sample_id for one in loop.differences]
    assert table["gap"].tolist() == [one.gap for one in loop.differences]
    assert (table["walk"] != table["loop"]).all()
    assert "3 of 3 prompts differ" in (run.out / "report.md").read_text()


def test_agreement_of_labels_is_known_also_of_a_strategy_that_does_not_read_the_last_hidden_state(
    trained: RunFiles, tmp_path: Path
) -> None:
    options = {"block_size": 3, "layer_ids": [2, 4, 5], "num_layers": 1, "intermediate_size": 32}
    other = {"strategy": "dflash", "options": options, "vocab_mapping": None}
    train(trained.train_run(out=tmp_path / "draft", **other), ProgramContext())
    run = run_of(trained, tmp_path / "report", None, prompts=1)
    known = evaluate(run, ProgramContext())["label_agreement"]
    run = run.model_copy(update={"draft": tmp_path / "draft", **other})
    assert evaluate(run, ProgramContext())["label_agreement"] == known

    found = read_feature_set(run.heldout.features)
    unnormed = run.heldout.model_copy(update={"features": tmp_path / "unnormed"})
    write_feature_set(unnormed.features, found.refs, FeatureSetIdentity(last_normed=False), found.streams, found.store)
    assert evaluate(run.model_copy(update={"heldout": unnormed}), ProgramContext())["label_agreement"] is None
