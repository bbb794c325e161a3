"""Held-out split and selection depend on the id alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.conversations import Conversation, Turn, select
from draftworks.data.split import hash_fraction, is_held_out

ids = st.text(alphabet="0123456789abcdef", min_size=1, max_size=16)
shares = st.floats(0, 1)


@given(st.lists(ids, unique=True), st.lists(ids, unique=True), shares)
def test_adding_data_never_moves_a_sample(first, added, share):
    before = {each for each in first if is_held_out(each, share)}
    after = {each for each in {*first, *added} if is_held_out(each, share)}
    assert before == after & set(first)


@given(ids, shares, shares)
def test_a_larger_share_keeps_what_a_smaller_one_held_out(sample_id, one, other):
    assert is_held_out(sample_id, min(one, other)) <= is_held_out(sample_id, max(one, other))


def test_the_share_is_met():
    held = sum(is_held_out(str(n), 0.1) for n in range(20_000)) / 20_000
    assert abs(held - 0.1) < 0.01


def test_selection_and_split_are_independent():
    chosen = [str(n) for n in range(20_000) if hash_fraction(str(n), "select") < 0.2]
    assert abs(sum(is_held_out(each, 0.1) for each in chosen) / len(chosen) - 0.1) < 0.02


def spoken(n: int) -> Conversation:
    return Conversation.of([Turn("user", str(n)), Turn("assistant", "yes")])


@given(st.sets(st.integers(0, 500), min_size=1, max_size=40), st.integers(0, 500), st.integers(1, 40), st.randoms())
def test_a_selection_ignores_order_and_changes_by_at_most_one_for_each_addition(numbers, added, size, random):
    items = [spoken(n) for n in numbers]
    shuffled = random.sample(items, len(items))
    before = select(items, size)
    assert before == select(shuffled, size)
    assert len(before) == min(size, len(items))
    lost = {each.id for each in before} - {each.id for each in select([*items, spoken(added)], size)}
    assert len(lost) <= 1
    assert select(items, None)[:size] == before


def test_the_split_is_the_same_in_every_process_and_release():
    """Values that were computed once: a sample that moves between training and held-out data spoils every comparison."""
    assert hash_fraction("0f1e2d3c4b5a6978", "held-out") == 0.38365285888346534
    assert hash_fraction("sample", "held-out") == 0.022140176501515896
    assert hash_fraction("聊天", "held-out") == 0.3940456588783334
    assert [is_held_out(each, 0.1) for each in ("0f1e2d3c4b5a6978", "sample", "聊天")] == [False, True, False]
