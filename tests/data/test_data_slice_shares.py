"""Shares of slices: kept exactly, deterministic, as large as the data allows, nothing twice; thinking is asked by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.config.registry_files import DataSpec
from draftworks.data.conversations import Conversation, Turn
from draftworks.data.prepare import SliceShares, choose_parts, select_shared
from draftworks.data.slices import THINKING_PAIR, SlicePlan, SliceWeight, read_asked_thinking
from draftworks.data.split import is_held_out
from draftworks.errors import DataError


def conversation(number: int, **columns: str) -> Conversation:
    return Conversation.of([Turn("user", f"question {number}"), Turn("assistant", "")], columns)


def by_language(**shares: float) -> SliceShares:
    return SliceShares("language", shares)


def by_thinking(on: float) -> SliceShares:
    return SliceShares("thinking", {"on": on, "off": 1 - on})


MADE = [conversation(number, language=("en", "de", "fr")[number % 3]) for number in range(90)]  # 30 of each
OPEN = [conversation(number, thinking="default") for number in range(200)]


@given(english=st.integers(0, 20), count=st.integers(0, 120), data=st.data())
def test_shares_are_kept_whatever_the_order_and_only_what_is_named_is_taken(english, count, data):
    share = english / 20
    shares = by_language(en=share, de=1 - share)
    found = select_shared(data.draw(st.permutations(MADE)), count, shares)
    assert found == select_shared(MADE, count, shares)
    assert len({one.id for one in found.conversations}) == len(found.conversations) == sum(found.taken.values())
    languages = [one.columns["language"] for one in found.conversations]
    assert {value: languages.count(value) for value in found.taken} == dict(found.taken)
    for value, wanted in shares.by_value.items():
        assert abs(found.taken.get(value, 0) - wanted * len(languages)) < 1
    scarce = min([count, *(30 / wanted for wanted in shares.by_value.values() if wanted)])
    assert scarce - 1 <= len(languages) <= scarce


def test_the_slice_with_the_least_data_for_its_share_decides():
    found = select_shared(MADE, 90, by_language(en=0.75, de=0.25))
    assert found.taken == {"en": 30, "de": 10}
    assert found.available == {"en": 30, "de": 30}


def test_weights_choose_inside_of_a_slice():
    made = [conversation(n, language="en", source="app" if n % 2 else "web") for n in range(400)]
    plan = SlicePlan("t", "s", "e", "n", "o", 9.0, (SliceWeight("source", "app", 9.0, 2.0, 1.0),))
    plain, weighted = (select_shared(made, 100, by_language(en=1.0), one).conversations for one in (None, plan))
    app = [sum(one.columns["source"] == "app" for one in chosen) for chosen in (plain, weighted)]
    assert app[0] < 65 < 80 < app[1]


def test_a_share_without_data_is_an_error_that_says_what_there_is():
    with pytest.raises(DataError, match=r"language: expected conversations of es .*found none. There are: de \(30\)"):
        select_shared(MADE, 9, by_language(en=0.5, es=0.5))
    assert select_shared(MADE, 9, by_language(en=1.0, es=0.0)).taken == {"en": 9}


@pytest.mark.parametrize("on", [0.0, 0.3, 1.0])
def test_prompts_that_leave_thinking_open_are_asked_by_the_shares(on: float):
    found = select_shared(OPEN, 100, by_thinking(on))
    ways = [read_asked_thinking(one.columns) for one in found.conversations]
    assert ways.count(True) == round(100 * on)
    assert ways.count(False) == 100 - round(100 * on)
    for one, way in zip(found.conversations, ways):
        assert one.id == f"{one.columns[THINKING_PAIR]}.{'on' if way else 'off'}"


def test_a_larger_share_of_thinking_asks_no_prompt_of_it_without():
    few, many = (
        {
            one.columns[THINKING_PAIR]
            for one in select_shared(OPEN, 200, by_thinking(on)).conversations
            if one.columns["thinking"] == "on"
        }
        for on in (0.2, 0.6)
    )
    both = {
        one.columns[THINKING_PAIR]: one.columns["thinking"]
        for one in select_shared(OPEN, 200, by_thinking(0.6)).conversations
    }
    assert len(few) < len(many)
    assert "off" not in {both.get(name) for name in few}


def test_prompts_whose_request_asked_are_asked_as_it_did():
    made = [conversation(n, thinking="on" if n % 4 == 0 else "off") for n in range(80)]
    found = select_shared(made, 80, by_thinking(0.5))
    assert found.taken == {"on": 20, "off": 20}
    asked = {one.id: one.columns["thinking"] for one in made}
    assert all(asked[str(one.columns[THINKING_PAIR])] == one.columns["thinking"] for one in found.conversations)


def test_what_is_measured_on_is_asked_both_ways_and_is_the_same_with_any_shares_of_thinking():
    data = DataSpec(held_out_share=0.2, max_conversations=100)
    plain = choose_parts(OPEN, data, None).parts
    parts = [choose_parts(OPEN, data, None, by_thinking(on)).parts for on in (0.0, 0.5, 1.0)]
    for one in parts:
        assert one["heldout"] == parts[0]["heldout"]
        assert [(each.columns[THINKING_PAIR], each.columns["thinking"]) for each in one["heldout"]] == [
            (each.id, way) for each in plain["heldout"] for way in ("off", "on")
        ]
        assert not any(is_held_out(each.prompt_key, 0.2) for each in one["train"])
    other = choose_parts(MADE, DataSpec(held_out_share=0.2), None, by_language(en=1.0)).parts
    assert other["heldout"] == choose_parts(MADE, DataSpec(held_out_share=0.2), None).parts["heldout"]
