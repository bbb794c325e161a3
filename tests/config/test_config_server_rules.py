"""The rules of servers, in figures as they were read in the wheels, and what is measured of them unasked."""

from __future__ import annotations

import pytest

from draftworks.config.decoding import (
    RULES,
    SERVER_RULES,
    SGLANG,
    UNKNOWN_SERVERS,
    VLLM,
    describe_servers,
    list_server_rules,
    list_usual_rules,
)
from draftworks.config.strategies import list_strategies, resolve_strategy

UNASKED = {
    "eagle3": {VLLM: "greedy_draft", SGLANG: "greedy_draft"},
    "peagle": {VLLM: "greedy_draft"},
    "mtp": {VLLM: "greedy_draft", SGLANG: "greedy_draft"},
    "dflash": {VLLM: "greedy_draft", SGLANG: "greedy_draft"},
    "domino": {SGLANG: "greedy_draft"},
    "dflash2": {VLLM: "greedy_draft", SGLANG: "rejection"},
    "dspark": {VLLM: "greedy_draft", SGLANG: "rejection"},
    "lilicorr": {VLLM: "greedy_draft", SGLANG: "greedy_draft"},
    "xpress": {VLLM: "greedy_draft"},
}


@pytest.mark.parametrize("strategy", UNASKED)
def test_what_servers_do_unasked(strategy: str):
    assert {row.server: row.rule for row in list_server_rules(strategy) if not row.flags} == UNASKED[strategy]


def test_every_strategy_that_a_known_server_loads_is_in_the_table():
    exported = {name for name in list_strategies() if resolve_strategy(name).exports}
    assert set(UNASKED) <= exported
    assert not [row for name in exported - set(UNASKED) for row in list_server_rules(name)]


@pytest.mark.parametrize("strategy", ["dflash2", "dspark", "lilicorr"])
def test_where_two_servers_differ_or_one_has_a_switch_of_its_own_both_are_measured(strategy: str):
    assert list_usual_rules(strategy) == ("greedy_draft", "rejection")


@pytest.mark.parametrize("strategy", sorted(set(UNASKED) - {"dflash2", "dspark", "lilicorr"}))
def test_where_all_draft_greedily_nothing_else_is_measured(strategy: str):
    assert list_usual_rules(strategy) == ("greedy_draft",)


def test_servers_are_named_with_what_sets_their_rule():
    assert describe_servers("eagle3", "greedy_draft") == f"{VLLM}, {SGLANG}"
    assert describe_servers("dspark", "rejection") == SGLANG
    assert "SGLANG_ENABLE_LILICORR_SAMPLING=1" in describe_servers("lilicorr", "rejection")
    assert "--speculative-use-block-verification" in describe_servers("eagle3", "block")
    assert describe_servers("eagle3", None) == ""


def test_a_strategy_that_no_server_knows_is_measured_as_both_draft():
    assert list_usual_rules("of_mine") == ("greedy_draft",)
    assert describe_servers("of_mine", "greedy_draft") == UNKNOWN_SERVERS


def test_no_server_has_two_rules_by_the_same_flags():
    named = [(row.server, strategy, row.flags) for row in SERVER_RULES for strategy in row.strategies]
    assert len(named) == len(set(named))
    assert {row.rule for row in SERVER_RULES} == set(RULES)
    assert all(row.source for row in SERVER_RULES)
