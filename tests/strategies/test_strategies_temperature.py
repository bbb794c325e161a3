"""`teacher_temperature`: losses at T in figures, and drafts that are judged at the temperature of serving, whatever theirs is."""

from __future__ import annotations

import math

import pytest
import torch
from dflash_toys import one_label
from objective_toys import SIZES, Case, batch_of, strategy_of
from strategy_cases import find_cases
from torch import Tensor

from draftworks.config.decoding import Decoding
from draftworks.config.draft_options import TeacherOptions
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.config.strict_yaml import parse_spec
from draftworks.drafts.logit_losses import LossSums
from draftworks.drafts.objectives import (
    Blend,
    CrossEntropy,
    LogAcceptance,
    LossSettings,
    MeanBlend,
    Objective,
    Teacher,
    TeacherPlan,
)
from draftworks.drafts.strategy import StepContext
from draftworks.errors import ConfigError
from draftworks.strategies.dspark.model import dspark_losses
from draftworks.strategies.dspark.options import DSparkOptions
from draftworks.strategies.eagle3.loss import distill
from draftworks.strategies.xpress.model import xpress_losses
from draftworks.strategies.xpress.options import XPressOptions

TAUGHT = [name for name in find_cases() if issubclass(resolve_strategy(name).options, TeacherOptions)]
VOCAB = 40
TARGET = torch.tensor([[0.0, math.log(9)]])
"""Logits of two tokens: q is (1, 9) / 10 at temperature 1, (1, 3) / 4 at 2, (1, 81) / 82 at 1/2."""
SAME = torch.zeros(1, 2)
"""A draft's logits: p is (1, 1) / 2 at every temperature, so α is 1/2 + q₀."""
HEAD = torch.eye(2)
SERVED = (Decoding(1.0, "rejection"), Decoding(2.0, "rejection"), Decoding(2.0, "greedy_draft"))
COLD = (Decoding(0.5, "rejection"), Decoding(0.5, "greedy_draft"))
TRAINING, JUDGING = StepContext(training=True), StepContext(training=False, served=COLD)


def distilled(states: Tensor, objective, settings: LossSettings, target: Tensor = TARGET):
    """The loss of one label of a draft that knows two tokens, of a target that may know more."""
    known, index = torch.arange(2), torch.full((target.shape[1],), -1)
    index[known] = known
    teacher = Teacher(target, torch.eye(target.shape[1]), known, index)
    plan = TeacherPlan(torch.tensor([0]), torch.tensor([[0]]))
    return distill(states, HEAD, teacher, plan, [1.0], objective, settings)


def served(found: LossSums) -> list[float]:
    return [each.item() for name, each in found.sums.items() if name.startswith("sampled")]


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (CrossEntropy(), 4 * math.log(2)),
        (LogAcceptance(), -4 * math.log(3 / 4)),
        (Blend(0.5, 0.0), 4 * (0.5 * math.log(2) + 0.5 / 4)),
        (MeanBlend(1.0, 1.0, positions=2), 4 * (math.exp(-3 / 4) * math.log(2) / 2 + (1 - math.exp(-3 / 4)) / 4)),
    ],
)
def test_the_distillation_loss_at_temperature_2_is_the_formulas_in_figures(objective: Objective, expected: float):
    found = distilled(SAME, objective, LossSettings(TRAINING, temperature=2.0))
    assert found.loss.item() == pytest.approx(expected)
    assert found.sums["loss_sums"].tolist() == pytest.approx([expected])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 50.0])
def test_the_gradient_of_the_cross_entropy_is_t_times_the_difference_of_the_distributions(temperature: float):
    states = torch.tensor([[0.3, -0.2]], requires_grad=True)
    (gradient,) = torch.autograd.grad(
        distilled(states, CrossEntropy(), LossSettings(TRAINING, temperature=temperature)).loss, states
    )
    p, q = (each[0].detach().div(temperature).softmax(0) for each in (states, TARGET))
    torch.testing.assert_close(gradient[0], temperature * (p - q))


def test_gradients_of_high_temperatures_are_of_one_size():
    """T² is there for it: the limit is (z - y, each less its mean) / V, here (ln 9, -ln 9) / 4."""
    states = SAME.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        distilled(states, CrossEntropy(), LossSettings(TRAINING, temperature=100.0)).loss, states
    )
    torch.testing.assert_close(gradient[0], torch.tensor([1.0, -1.0]) * math.log(9) / 4, rtol=1e-3, atol=0)


def test_acceptance_over_a_reduced_vocabulary_is_of_the_targets_mass_at_each_temperature():
    """The target's probabilities are (1, 9, 4) / 14 at temperature 1 and (1, 3, 2) / 6 at 2; the draft lacks the last, and
    says the first where it has to choose.
    """
    target = torch.tensor([[0.0, math.log(9), math.log(4)]])
    found = distilled(
        SAME, CrossEntropy(), LossSettings(StepContext(training=False, served=SERVED), temperature=0.5), target
    )
    assert found.sums["unconditional_acceptance_sums"].tolist() == pytest.approx([1 / 14 + 1 / 2])
    assert served(found) == pytest.approx([1 / 14 + 1 / 2, 1 / 6 + 1 / 2, 1 / 6])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_dsparks_loss_is_the_formulas_in_figures(temperature: float):
    """CE of the token is ln 2 at temperature 1; ‖q - p‖₁ is 4/5 at 1 and 1/2 at 2."""
    distance = {1.0: 4 / 5, 2.0: 1 / 2}[temperature]
    options = DSparkOptions(ce_weight=0.3, tv_weight=0.9, confidence_weight=0.7)
    settings = LossSettings(JUDGING, options, temperature)
    narrow, confidences = torch.zeros(1, 1), torch.zeros(1)
    found = dspark_losses(one_label(SAME, TARGET), narrow, confidences, HEAD, torch.zeros(2, 1), settings)
    expected = 0.3 * math.log(2) + 0.9 * temperature**2 * distance + 0.7 * math.log(2)
    assert found.loss.item() == pytest.approx(expected)
    assert found.sums["confidence_error_sums"].tolist() == pytest.approx([1 / 2 - distance / 2])
    assert served(found) == pytest.approx([1 / 2 + 1 / 82, 1 / 82])
    assert (found.sums["acceptance_sums"].item(), found.sums["tau_sums"].item()) == pytest.approx((0.6, 0.6))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_xpresses_loss_is_the_formulas_in_figures(temperature: float):
    """All its passes say the same here, so a label costs 1 + 0.3 + 0.6 times that of one."""
    distance = {1.0: 2 / 5, 2.0: 1 / 4}[temperature]
    settings = LossSettings(JUDGING, XPressOptions(consistency_passes=1), temperature)
    found = xpress_losses(one_label(SAME, TARGET), torch.zeros(1, 2, 1), HEAD, torch.zeros(2, 1), settings)
    assert found.loss.item() == pytest.approx(1.9 * (0.1 * math.log(2) + 0.9 * temperature**2 * distance))
    assert served(found) == pytest.approx([1 / 2 + 1 / 82, 1 / 82])
    assert (found.sums["acceptance_sums"].item(), found.sums["tau_sums"].item()) == pytest.approx((0.6, 0.6))


@pytest.mark.parametrize("strategy", TAUGHT)
def test_a_draft_is_judged_at_the_temperatures_of_serving_whatever_it_was_trained_at(strategy: str):
    decodings = [Decoding(each, rule) for rule in ("rejection", "greedy_draft") for each in (0.5, 2.0)]
    served = StepContext(training=False, served=tuple(decodings))
    found = {}
    for teacher in (1.0, 3.0):
        made = strategy_of(Case(strategy, {"teacher_temperature": teacher}), VOCAB)
        batch = batch_of(made, 2, VOCAB)
        with torch.no_grad():
            found[teacher] = made.forward_loss(batch, served)
            trained = made.forward_loss(batch, StepContext(training=True))
        assert not any(name.startswith("sampled") for name in trained.metric_sums)
    plain, soft = found[1.0].metric_sums, found[3.0].metric_sums
    assert found[1.0].loss_sum.item() != pytest.approx(found[3.0].loss_sum.item(), rel=0.01)
    judged = [name for name in plain if "acceptance" in name or name.startswith(("acc_", "tau_"))]
    assert {f"sampled_acceptance_{each.suffix}_sums" for each in decodings} < set(judged)
    for name in judged:
        torch.testing.assert_close(soft[name], plain[name])
    cold, hot, cold_greedy, hot_greedy = (plain[f"sampled_acceptance_{each.suffix}_sums"] for each in decodings)
    assert (cold < hot).all()  # two made-up distributions agree the more, the flatter both are
    assert (hot_greedy < hot).all()  # and the flatter the target is, the less likely is one token
    assert not torch.equal(cold_greedy, hot_greedy)


@pytest.mark.parametrize("strategy", TAUGHT)
def test_what_a_greedy_draft_loses_by_temperature_ends_at_the_targets_own_argmax(strategy: str):
    """Near temperature 0 the target says its argmax: then the rule counts what the accuracy counts, and no rejection is left."""
    made = strategy_of(Case(strategy, {}), VOCAB)
    served = (Decoding(0.001, "greedy_draft"), Decoding(0.001, "rejection"))
    with torch.no_grad():
        found = made.forward_loss(batch_of(made, 2, VOCAB), StepContext(training=False, served=served)).metric_sums
    greedy, rejection = (found[f"sampled_acceptance_{each.suffix}_sums"] for each in served)
    torch.testing.assert_close(greedy, rejection, rtol=0, atol=1e-3)
    if strategy in ("eagle3", "peagle"):  # their labels are the target's argmax
        torch.testing.assert_close(greedy, found["acc_corrects"].to(greedy.dtype), rtol=0, atol=1e-3)


@pytest.mark.parametrize("strategy", TAUGHT)
def test_the_temperature_is_in_the_identity_of_a_draft_unless_it_is_1(strategy: str):
    options = resolve_strategy(strategy).options
    assert "teacher_temperature" not in options(**SIZES[strategy]).to_identity()
    assert options(**SIZES[strategy], teacher_temperature=0.7).to_identity()["teacher_temperature"] == 0.7


@pytest.mark.parametrize("strategy", sorted({*list_strategies()} - {*TAUGHT}))
def test_strategies_that_learn_from_tokens_refuse_a_temperature(strategy: str):
    with pytest.raises(ConfigError, match="labels are tokens"):
        parse_spec(resolve_strategy(strategy).options, {"teacher_temperature": 0.7}, strategy)


@pytest.mark.parametrize("strategy", ["dspark", "xpress"])
def test_a_temperature_that_nothing_reads_is_refused(strategy: str):
    with pytest.raises(ConfigError, match="tv_weight, which is 0"):
        parse_spec(resolve_strategy(strategy).options, {"teacher_temperature": 0.7, "tv_weight": 0}, strategy)
