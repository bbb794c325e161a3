"""A report with every rung, small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pandas as pd

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.result import EvalResult

QUICK = Resampling(resamples=200)
DRAFT_TOKENS = 3


def prompts(*accepted: list[int]) -> tuple[PromptAcceptance, ...]:
    """Prompts s0, s1, ... by the accepted tokens of their passes."""
    return tuple(
        PromptAcceptance.from_accepted_counts(f"s{index}", lengths, sum(lengths) + len(lengths))
        for index, lengths in enumerate(accepted)
    )


def result(correct: tuple[float, float], loss_weight: float = 10.0) -> EvalResult:
    return EvalResult(30.0, loss_weight, 40, {"acc_corrects": correct, "acc_denoms": (10.0, 8.0)})


def full_report() -> Report:
    """The walk: trained accepts 9 tokens in 6 passes, untrained 1 in 12; greedy, the loop is 1.5 times as fast."""
    walk = prompts([3, 1], [2, 0, 3], [0])
    trained = DraftMeasurement(
        result((8.0, 4.0)),
        blocks=prompts([3, 2, 1, 0], [2, 1, 0, 3], [0]),
        walk=walk,
        loops=(
            LoopMeasurement(GREEDY, walk, 2.0, 3.0, 18, 18),
            LoopMeasurement(Decoding(0.7, "greedy_draft"), prompts([1], [2], [0]), 4.0, 2.0, 9, 9),
        ),
    )
    untrained = DraftMeasurement(result((1.0, 0.0)), walk=prompts([0] * 5, [1, 0, 0, 0, 0], [0, 0]))
    return Report(
        target="tiny",
        strategy="eagle3",
        eval_set="heldout",
        drafts={"trained": trained, "untrained": untrained, "bigram": DraftMeasurement(result((3.0, 2.0), 0.0))},
        draft_tokens=DRAFT_TOKENS,
        label_agreement=1.0,
        columns=pd.DataFrame(
            {"task": ["code", "chat", "code"], "language": ["en", "en", "en"]}, index=["s0", "s1", "s2"]
        ),
        resampling=QUICK,
        provenance={"target_digest": "0123", "weights_digest": "4567"},
        created=datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC),
    )


def rungs_0_and_1() -> Report:
    """The same evaluation without what counts passes."""
    report = full_report()
    drafts = {name: DraftMeasurement(measured.result) for name, measured in report.drafts.items()}
    return replace(report, drafts=drafts, label_agreement=None, columns=None)
