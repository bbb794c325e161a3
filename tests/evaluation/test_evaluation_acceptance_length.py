"""The acceptance length is one more than the accepted draft tokens per pass, also as three servers and papers count it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.evaluation.acceptance_length import (
    count_own_token,
    format_change,
    format_interval,
    format_length,
    name_metric,
)

accepted = st.floats(0.0, 50.0)


@given(accepted, accepted)
def test_a_difference_of_two_lengths_is_that_of_what_was_accepted(a: float, b: float) -> None:
    """So margins, which are differences, mean the same in both."""
    assert count_own_token(a) - count_own_token(b) == pytest.approx(a - b, abs=1e-9)


@given(accepted, st.integers(1, 400))
def test_it_is_the_tokens_that_a_pass_yields(length: float, passes: int) -> None:
    """vLLM: 1 + accepted / drafts; SGLang: completion tokens / verifications."""
    taken = round(length * passes)
    assert count_own_token(taken / passes) == pytest.approx((taken + passes) / passes)


def test_what_is_shown_is_fixed() -> None:
    assert (format_length(1.0857), format_length(0.0, 3), format_length(None)) == ("2.09", "1.000", "none")
    assert format_interval(0.87, 1.14, between="–") == "1.87–2.14"
    assert format_change(-0.0001, -0.25, 0.5, 2) == "+0.00 (-0.25 to +0.50)"


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ("rung3_walk_acc_len", "walk (rung 3)"),
        ("eval/rung4_loop_t0_acc_len", "loop (rung 4), at temperature 0"),
        ("rung4_loop_acc_len_t0.7_greedy_draft", "loop (rung 4), at temperature 0.7, by greedy_draft"),
        (
            "eval/rung4_loop_t0.7_k20_p0.9_block_acc_len",
            "loop (rung 4), at temperature 0.7, top-k 20, top-p 0.9, by block",
        ),
        ("rung4_loop_acc_len_t0.7", "loop (rung 4), at temperature 0.7, by rejection"),
        ("simulated_acc_len", "simulated (rung 1)"),
        ("eval/simulated_acc_len_t1", "simulated (rung 1), at temperature 1, by rejection"),
        ("eval/rung6_server_acc_len", "server (rung 6)"),
        ("per_position_acc_2", "per_position_acc_2"),
    ],
)
def test_stored_names_have_words(stored: str, words: str) -> None:
    assert name_metric(stored) == words
