"""A strategy's own metrics are those that not every evaluation has."""

from __future__ import annotations

from draftworks.evaluation.result import EvalResult
from draftworks.evaluation.strategy_metrics import (
    describe_strategy_metrics,
    format_rates_by_position,
    select_strategy_metrics,
)

LADDER = dict.fromkeys(
    ("acc_corrects", "acc_denoms", "loss_sums", "loss_denoms", "acceptance_sums", "acceptance_denoms"), (1.0, 1.0)
) | dict.fromkeys(("block_passes", "block_accepted", "walk_passes", "walk_accepted"), (1.0,))


def metrics(**own: tuple[float, ...]) -> dict:
    return EvalResult(loss_sum=1.0, loss_weight=1.0, tokens=2, metric_sums=LADDER | own).metrics()


def test_what_every_evaluation_has_is_nobodys_own():
    assert select_strategy_metrics(metrics()) == {}


def test_what_a_strategy_counts_itself_is_shown_by_its_name():
    counted = {"tau_sums": (3.0,), "tau_denoms": (2.0,), "miss_sums": (1.0, 3.0), "miss_denoms": (2.0, 4.0)}
    assert select_strategy_metrics(metrics(**counted)) == {"tau": 1.5, "miss": [0.5, 0.75]}


def test_acceptance_rates_are_a_line_each_under_the_name_that_says_over_which_positions():
    assert format_rates_by_position(metrics()) == {"acceptance_rate": "1.000 · 1.000"}
    both = {"unconditional_acceptance_sums": (1.0, 1.0), "unconditional_acceptance_denoms": (2.0, 4.0)}
    assert format_rates_by_position(metrics(**both)) == {
        "conditional_acceptance_rate": "1.000 · 1.000",
        "unconditional_acceptance_rate": "0.500 · 0.250",
    }
    assert format_rates_by_position({}) == {}


def test_people_are_shown_lengths_with_the_own_token_of_the_target() -> None:
    """SpecForge's accept_len and every server's are one more than what is stored."""
    stored = metrics(accept_len_sums=(6.0,), accept_len_denoms=(4.0,), miss_sums=(1.0,), miss_denoms=(2.0,))
    assert select_strategy_metrics(stored) == {"accept_len": 1.5, "miss": 0.5}
    assert describe_strategy_metrics(stored) == {"acceptance_length": 2.5, "miss": 0.5}
