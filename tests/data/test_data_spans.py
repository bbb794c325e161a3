"""Spans of the assistant in rendered text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.spans import TRANSFORMS, EndOfTurn, Span, build_label_mask, locate, make_sentinel
from draftworks.errors import DataError

pieces = st.text(alphabet="ab \n", max_size=6)


@given(st.lists(st.tuples(pieces, pieces), min_size=1, max_size=4), pieces, st.sampled_from(TRANSFORMS))
def test_located_spans_hold_what_was_said(pairs, tail, transform):
    literals, contents = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    text = "".join(literal + transform(content) for literal, content in pairs) + tail
    template = "".join(literal + make_sentinel(n) for n, literal in enumerate(literals)) + tail
    spans = locate(text, template, range(len(pairs)), contents)
    assert len(spans) == len(pairs)
    assert all(text[start:end] in (content, content.strip(), content.lstrip(), content.rstrip())
               for (start, end), content in zip(spans, contents))  # fmt: skip


def test_words_the_template_changed_are_not_located():
    with pytest.raises(DataError, match="changes the assistant's words"):
        locate("a: HI", "a: " + make_sentinel(0), [0], ["hi"])


@pytest.mark.parametrize(
    "template", ["a", make_sentinel(1) + make_sentinel(0), make_sentinel(0) * 2 + make_sentinel(1)]
)
def test_sentinels_must_stand_once_and_in_order(template):
    with pytest.raises(DataError, match="exactly once and in order"):
        locate("a", template, [0, 1], ["x", "y"])


def test_end_of_turn_is_the_special_token_that_follows():
    end = EndOfTurn(["<|end|>", "<|end|>x", ""])
    assert end.append("hi<|end|> more", Span(0, 2)) == Span(0, 9)
    assert end.append("hi <|end|>x more", Span(0, 2)) == Span(0, 11)
    assert end.append("hi more<|end|>", Span(0, 2)) == Span(0, 2)
    assert end.complete("hi<|end|>\n<|end|>", Span(0, 10)) == Span(0, 10)
    assert end.complete("hi<|end|>", Span(0, 2)) == Span(0, 9)
    assert EndOfTurn([]).append("hi<|end|>", Span(0, 2)) == Span(0, 2)


def test_tokens_count_only_if_they_lie_inside_one_span():
    offsets = np.array([[0, 2], [2, 4], [3, 4], [5, 7], [7, 7], [7, 9]])
    assert build_label_mask(offsets, [Span(2, 7)]).tolist() == [False, True, True, True, False, False]
    assert build_label_mask(offsets, [Span(3, 9)]).tolist() == [False, False, True, True, False, True]
    assert build_label_mask(offsets, [Span(5, 9)]).tolist() == [False, False, False, False, False, True]
    assert not build_label_mask(offsets, []).any()
    assert build_label_mask(np.zeros((0, 2), int), [Span(0, 1)]).shape == (0,)
