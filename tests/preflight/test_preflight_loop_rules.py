"""A rule of acceptance that no server has for a strategy is warned of, and only then."""

from __future__ import annotations

import pytest

OPTIONS = {"eagle3": {"draft_vocab_size": 32}, "xpress": {"mask_token_id": 3, "block_size": 4}}


def warnings_of(fleet, strategy: str, rules: list[str] | None) -> list[str]:
    loop = {"temperatures": [0, 0.7], "rules": rules}
    fleet.write(evaluation={"loop": loop}, strategies={strategy: {"options": OPTIONS[strategy]}})
    return [line for line in fleet.check().warnings if "evaluation.loop.rules" in line]


def test_a_rule_that_servers_do_not_have_is_named_with_those_that_they_have(fleet):
    [warning] = warnings_of(fleet, "xpress", ["greedy_draft", "block"])
    assert warning == (
        "target small: evaluation.loop.rules: found block; servers accept drafts of xpress by greedy_draft only"
    )


@pytest.mark.parametrize(
    ("strategy", "rules"),
    [("xpress", ["greedy_draft"]), ("xpress", None), ("eagle3", ["greedy_draft", "rejection", "block"])],
)
def test_rules_that_servers_have_are_taken(fleet, strategy: str, rules: list[str] | None):
    assert warnings_of(fleet, strategy, rules) == []
