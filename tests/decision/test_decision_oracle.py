"""The rules of decision and promotion against an oracle that was written from the documents, on random facts.

Values are sixteenths, so that they often are equal to a margin or to each other, and any other number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decision_oracle import oracle_count_prompts, oracle_decide, oracle_promote
from fleet_facts import describe_decision, describe_loss, describe_paired, describe_promotion
from hypothesis import given
from hypothesis import strategies as st
from service_toys import WEIGHTS_OF_TARGET, record

from draftworks.decision.record import UNPAIRED, Choice, Margins, Reference
from draftworks.decision.rule import Loss, LossEvidence, decide, subtract_figures
from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Interval
from draftworks.service import rule as promotion
from draftworks.service.register import EvalFigures, InService

EVAL_SETS = ("heldout", "code", "chat")
DRAFTS = ("d1", "d2", "d3", "d4")
PROMPTS = st.one_of(st.sampled_from([0, 19, 20, 21]), st.integers(1, 5000))


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    grid = st.integers(round(low * 16), round(high * 16)).map(lambda each: each / 16)
    return st.one_of(grid, st.floats(low, high, allow_subnormal=False))


@st.composite
def differences(draw: st.DrawFn) -> AcceptanceDifference:
    value, below, above = draw(numbers(-1, 1)), draw(numbers(0, 0.5)), draw(numbers(0, 0.5))
    return AcceptanceDifference(value, 0.0, Interval(value - below, value + above, 0.95), 1.0, draw(PROMPTS))


@st.composite
def measurements(draw: st.DrawFn) -> dict[str, Any]:
    """A value with an interval that may lie beside it, as a bootstrap's may."""
    value = draw(numbers(0, 3))
    low, width = value - draw(numbers(-0.125, 0.5)), draw(numbers(0, 0.5))
    return {"value": value, "low": low, "high": low + width, "prompts": draw(PROMPTS)}


@st.composite
def losses(draw: st.DrawFn, eval_set: str) -> tuple[LossEvidence, dict[str, Any]]:
    reference, tune = draw(st.sampled_from(Reference)), draw(st.sampled_from([None, "t"]))
    tuned = tune is not None
    if reference is Reference.NONE:
        is_new = draw(st.booleans())
        evidence = LossEvidence(eval_set, reference, "d", after_tune=tune, is_new=is_new)
        return evidence, describe_loss(eval_set, reference, is_new=is_new, tuned=tuned)
    if reference in UNPAIRED:
        former, now = draw(measurements()), draw(measurements())
        intervals = [Interval(each["low"], each["high"], 0.95) for each in (former, now)]
        loss = subtract_figures(former["value"], intervals[0], now["value"], intervals[1])
        counts = {"prompts": now["prompts"], "reference_prompts": former["prompts"]}
        evidence = LossEvidence(
            eval_set, reference, "d", now["value"], former["value"], loss, after_tune=tune, **counts
        )
        return evidence, describe_loss(eval_set, reference, former=former, now=now, tuned=tuned)
    paired = draw(differences())
    loss = Loss(-paired.difference, -paired.interval.high, -paired.interval.low)
    evidence = LossEvidence(eval_set, reference, "d", 1.0, 1.0, loss, paired.prompts, paired.prompts, tune)
    same = draw(st.booleans())
    facts = describe_loss(eval_set, reference, paired=paired, tuned=tuned, same=same)
    return replace(evidence, same_weights=same), facts


@given(
    st.tuples(*map(losses, EVAL_SETS)),
    st.integers(1, 3),
    st.sampled_from([(0.0625, 0.1875), (0.05, 0.15), (0.0, 0.5)]),
)
def test_the_choice_is_that_of_the_documents(
    drawn: tuple[tuple[LossEvidence, dict[str, Any]], ...], count: int, margins: tuple[float, float]
):
    tune, retrain = margins
    verdict = decide([evidence for evidence, _ in drawn[:count]], Margins(tune, retrain, 20))
    facts = describe_decision(tune, retrain, 20, [found for _, found in drawn[:count]])
    assert oracle_decide(facts) == verdict.choice
    for found, each in zip(verdict.figures, facts["eval_sets"], strict=True):
        if found.choice is Choice.UNDECIDED and found.loss is not None:
            assert oracle_count_prompts(facts["margins"], each) == found.needed


@st.composite
def histories(draw: st.DrawFn) -> list[InService]:
    """Records of drafts that came and went, some of them for other weights."""
    found: list[InService] = []
    for number in range(1, draw(st.integers(1, 7)) + 1):
        figures = []
        if draw(st.booleans()):
            difference = draw(st.one_of(st.none(), numbers(-0.5, 0.5)))
            reference = None if difference is None else draw(st.sampled_from(DRAFTS))
            figures = [EvalFigures("heldout", "non_inferior", 0.0625, reference=reference, difference=difference)]
        weights = draw(st.sampled_from([WEIGHTS_OF_TARGET, WEIGHTS_OF_TARGET, "f" * 16]))
        found.append(record(number, draw(st.sampled_from(DRAFTS)), figures, weights))
    return found


@given(
    histories(),
    st.fixed_dictionaries({name: st.one_of(st.none(), differences()) for name in DRAFTS}),
    st.sampled_from([0.0, 0.03, 0.0625]),
    st.sets(st.sampled_from(DRAFTS)),
)
def test_the_verdict_is_that_of_the_documents(
    history: list[InService], paired: dict[str, AcceptanceDifference | None], margin: float, same: set[str]
):
    ranked = promotion.rank_earlier(history, WEIGHTS_OF_TARGET, "heldout")
    compared = {
        each.digest: promotion.Compared(
            paired[each.digest], reason="no prompt in common", same_weights=each.digest in same
        )
        for each in ranked
    }
    is_known = promotion.was_measured(history, WEIGHTS_OF_TARGET, "heldout")
    found = promotion.judge_eval_set("heldout", ranked, compared, promotion.Margins(margin, 20), is_known)
    known = {each.digest: paired[each.digest] for each in ranked}
    facts = describe_promotion("heldout", margin, 20, history, WEIGHTS_OF_TARGET, known, same)
    assert oracle_promote(facts) == found.verdict


def test_facts_hold_numbers_and_names_only():
    assert describe_paired(None) is None
    paired = AcceptanceDifference(0.5, 0.0, Interval(0.25, 0.75, 0.95), 1.0, 20, 1, 2)
    assert describe_paired(paired) == {"difference": 0.5, "low": 0.25, "high": 0.75, "prompts": 20, "same": False}
