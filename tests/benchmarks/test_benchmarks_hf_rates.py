"""Rates of engine `hf`: all sides work on the same tokens, and shares are of the same turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_rates import Rate, measure, print_turns


@pytest.mark.long
def test_all_sides_make_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    turns = measure(tmp_path, conversations=5, turns=1)
    tokens = {name: rates[0].tokens for name, rates in turns.items()}
    assert tokens["capture"] == tokens["bare forward"] == tokens["bare forward, no head"] > 0
    assert 0 < tokens["greedy generate"] <= tokens["greedy answers"]  # it stops where the longest prompt has to
    assert tokens["sampled generate"] > 0
    print_turns(turns)
    assert "aim: at least 1.5" in capsys.readouterr().out


def test_a_share_is_of_the_rival_of_the_same_turn(capsys: pytest.CaptureFixture[str]):
    ours, rival = [Rate(10, 1, 1), Rate(30, 1, 1)], [Rate(5, 1, 1), Rate(10, 1, 1)]
    names = ("greedy answers", "sampled answers", "capture")
    rivals = ("greedy generate", "sampled generate", "bare forward", "bare forward, no head")
    print_turns(dict.fromkeys(names, ours) | dict.fromkeys(rivals, rival))
    assert "| greedy generate | 8 (5 to 10) | 2.50 (2.00 to 3.00) |" in capsys.readouterr().out
