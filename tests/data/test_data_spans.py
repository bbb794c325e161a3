"""Spans of the assistant in rendered text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.spans import EndOfTurn, find_begin_of_thought, find_end_of_thought, find_last_words

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


def test_marks_of_thoughts_are_those_of_every_family():
    for begin, end in (
        ("<think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("◁think▷", "◁/think▷"),
    ):
        text = f"{begin}a{end}b"
        assert find_begin_of_thought(text)[0] == begin
        assert text[find_end_of_thought(text) :] == "b"
    assert find_begin_of_thought("<thinks about>") is None
    assert find_end_of_thought("a < b > c") == 0


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
