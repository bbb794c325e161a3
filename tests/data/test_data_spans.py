"""Spans of the assistant in rendered text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.chat import (
    EndOfTurn,
    fill_empty_thought,
    find_end_of_thought,
    find_last_words,
    find_leading_thought,
    find_open_thought,
    make_end_of_thought,
    measure_common_prefix,
)

words = st.text(alphabet="ab \n", max_size=6)


@given(words, words, words)
def test_words_are_found_at_the_end_however_white_space_is_moved(before, said, moved):
    letters = iter("".join(said.split()))
    blanks = [each for each in moved if each.isspace()]
    printed = before + "".join(letter + "".join(blanks) for letter in letters)
    start = find_last_words(printed, said)
    assert start is not None
    assert "".join(printed[start:].split()) == "".join(said.split())
    assert start == len(printed) or not printed[start].isspace()


def test_a_text_that_ends_with_other_words_has_them_nowhere():
    assert find_last_words("a: HI", "hi") is None
    assert find_last_words("hi there", "hi") is None
    assert find_last_words("i", "hi") is None


THOUGHTS = (
    *(
        ("<think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("<think:free>", "</think:free>"),
        ("[THINK]", "[/THINK]"),
    ),
    *(("◁think▷", "◁/think▷"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("<reasoning>", "</reasoning>")),
)


@pytest.mark.parametrize(("begin", "end"), THOUGHTS)
def test_marks_of_thoughts_are_those_of_every_family(begin, end):
    text = f"{begin}a{end}b"
    assert find_leading_thought(f"\n{text}")[0] == begin
    assert find_leading_thought(f"b{text}") is None
    assert make_end_of_thought(find_leading_thought(text)) == end
    assert text[find_end_of_thought(text) :] == "b"
    assert find_open_thought(text) is None
    assert find_open_thought(f"{text}{begin}\n")[0] == begin
    assert fill_empty_thought(f"a{begin}{end}b", "hm") == f"a{begin}hm{end}b"
    assert fill_empty_thought(f"{begin}\n\n{end}\n\n", " hm ") == f"{begin}\nhm\n{end}\n\n"
    assert fill_empty_thought(f"{begin}so{end}", "hm") is None


def test_what_is_no_mark_of_a_thought_is_none():
    assert find_leading_thought("<thinks about>") is None
    assert find_end_of_thought("a < b > c") == 0


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ("a<think>", "a</think>", "a"),
        ("a<|START_THINKING|>", "a<|START_TEXT|>b", "a"),
        ("a[THINK]", "a[/THINK]", "a"),
        ("ab", "ab<c>", "ab"),
        ("a <b and c", "a <b and d", "a <b and "),
        ("same", "same", "same"),
    ],
)
def test_texts_part_before_the_mark_that_differs(first, second, common):
    assert first[: measure_common_prefix(first, second)] == common == second[: measure_common_prefix(second, first)]


def test_end_of_turn_is_the_special_token_that_follows():
    end = EndOfTurn(["<|end|>", "<|end|>x", ""])
    assert end.after("hi<|end|> more", 2) == 9
    assert end.after("hi <|end|>x more", 2) == 11
    assert end.after("hi more<|end|>", 2) == 2
    assert end.after("hi<|end|>\n<|end|>", 2) == 9
    assert EndOfTurn([]).after("hi<|end|>", 2) == 2
    assert EndOfTurn(["<|end|>"], swallowing=["<|end|>"]).after("hi<|end|>\n a", 2) == 11


def test_a_turn_is_closed_as_far_as_a_server_goes_on_to_generate():
    """Command A and gpt-oss close the answer, then the turn; the header of the next one is no end."""
    end = EndOfTurn(["<|answer|>", "<|turn|>", "<|user|>"], ending=["<|turn|>"])
    assert end.after("hi<|answer|><|turn|><|user|>", 2) == len("hi<|answer|><|turn|>")
    assert end.after("hi<|turn|><|user|>", 2) == len("hi<|turn|>")
    assert end.after("hi<|answer|><|user|>more<|turn|>", 2) == len("hi<|answer|>")
