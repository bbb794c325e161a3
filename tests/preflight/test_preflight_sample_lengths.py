"""Lengths of the first rows: what gives no sample, does not fit into a row, or is too little to learn from."""

from __future__ import annotations

from typing import Any

import pytest


def make_chats(count: int, words: int = 3, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number} " + "and " * words},
                {"role": "assistant", "content": f"It is {number} indeed."},
            ]
        }
        for number in range(first, first + count)
    ]


PASSTHROUGH = {"responses": {"mode": "passthrough"}}


@pytest.mark.parametrize("entry", [{}, PASSTHROUGH], ids=["regenerate", "passthrough"])
@pytest.mark.parametrize(
    ("rows", "severity"),
    [
        (make_chats(54) + make_chats(6, words=200, first=54), "errors"),  # all rows of the data set are known
        (make_chats(54) + make_chats(10, words=200, first=54) + make_chats(500, first=64), "warnings"),
        (make_chats(200), None),
        (make_chats(63) + make_chats(1, words=200, first=63) + make_chats(500, first=64), None),
    ],
    ids=["whole", "sample", "none too long", "as many as allowed"],
)
def test_prompts_without_room_count_against_the_allowed_share(fleet, entry, rows, severity):
    fleet.write_rows(rows)
    fleet.write(**entry)
    found = fleet.check()
    told = {
        kind: [text for text in getattr(found, kind) if "give no sample" in text] for kind in ("errors", "warnings")
    }
    assert {kind for kind, texts in told.items() if texts} == ({severity} if severity else set()), found
    assert severity == "errors" or found.errors == []
    if severity:
        [first, *_] = told[severity]
        assert "; allowed: 5.0%, data.max_rejected_share)" in first
        assert "tokens leaves no room within max_length 96" in first or "no supervised token in the first 96" in first


def test_more_may_be_lost_where_the_target_allows_it(fleet):
    fleet.write_rows(make_chats(54) + make_chats(6, words=200, first=54))
    fleet.write(data={"max_rejected_share": 0.5})
    assert fleet.check().errors == []


def test_an_eval_set_is_checked_as_the_part_that_it_takes(fleet):
    rows = make_chats(20) + make_chats(20, words=200, first=20)
    root = fleet.root / "registry"
    text = fleet.chats.read_text()
    fleet.write_rows(rows)
    (root / "gold.jsonl").write_text(fleet.chats.read_text())
    fleet.chats.write_text(text)
    (root / "datasets" / "gold.yaml").write_text("files: [gold.jsonl]\n")
    (root / "evals" / "gold.yaml").write_text("dataset: gold\n")
    fleet.write(evals=["gold"], **PASSTHROUGH)
    [error] = fleet.check().errors
    assert "data set gold: 20 of the 40 rows of eval set gold give no sample (50.0%;" in error


@pytest.mark.parametrize("entry", [{}, PASSTHROUGH], ids=["regenerate", "passthrough"])
def test_samples_that_do_not_fit_into_a_packed_row_are_an_error(fleet, entry):
    def check(**training: Any):
        eagle = {"options": {"ttt_length": 2, "draft_vocab_size": 64}, "training": training}
        fleet.write(strategies={"eagle3": eagle}, **entry)
        return fleet.check()

    fleet.write_rows(make_chats(40) + make_chats(5, words=40, first=40))
    [error] = check(pack_tokens=40).errors
    assert "tokens, more than pack_tokens 40 of eagle3, and the training ends there" in error
    assert check(pack_tokens=40, pack_overlong="own_row").errors == []
    fitting = check(pack_tokens=80)
    assert fitting.errors == []
    assert any("pack_tokens: found 80" in warning for warning in fitting.warnings)
    assert check(pack_tokens=96).warnings == []


def test_rows_that_may_not_be_chosen_do_not_have_to_fit_into_a_packed_row(fleet):
    fleet.write_rows(make_chats(300) + make_chats(20, words=40, first=300))
    fleet.write_rows(make_chats(20, words=40) + make_chats(300, first=20))
    training = {"pack_tokens": 40}
    eagle = {"options": {"ttt_length": 2, "draft_vocab_size": 64}, "training": training}
    fleet.write(strategies={"eagle3": eagle}, data={"max_conversations": 100})
    assert fleet.check().errors == []
    fleet.write(strategies={"eagle3": eagle})
    assert len(fleet.check().errors) == 1


@pytest.mark.parametrize(
    ("entry", "bound"),
    [
        (
            {"responses": {"max_new_tokens": 2}, "data": {"min_supervised_share": 0.5}},
            "with responses.max_new_tokens 2",
        ),
        ({"data": {"min_supervised_share": 0.8}, **PASSTHROUGH}, "to train on, at most"),
    ],
)
def test_a_share_of_supervised_tokens_that_no_answer_reaches(fleet, entry, bound):
    fleet.write_rows(make_chats(40, words=20))
    fleet.write(**entry)
    found = fleet.check()
    assert any(bound in error and "(data.min_supervised_share)" in error for error in found.errors), found
    fleet.write_rows(make_chats(400, words=20))
    fleet.write(**entry)
    found = fleet.check()
    assert found.errors == []
    assert any("(data.min_supervised_share)" in warning for warning in found.warnings)
    fleet.write(**{**entry, "data": {"min_supervised_share": 0.02}})
    assert fleet.check() == type(found)([], [], [])


def test_answers_of_one_token_are_an_error_unless_no_answer_is_made(fleet):
    fleet.write(responses={"max_new_tokens": 1})
    assert any("responses.max_new_tokens is 1" in error for error in fleet.check().errors)
    fleet.write_rows([{"input_ids": [5, number, 7, 8], "loss_mask": [0, 0, 1, 1]} for number in range(60)])
    fleet.write(responses={"max_new_tokens": 1, "mode": "passthrough"})
    assert fleet.check().errors == []
