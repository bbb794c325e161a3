"""Documents of a row: where they begin and end, and that nothing looks beyond."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftworks.drafts.documents import Documents, Run

lengths = st.lists(st.integers(1, 7), min_size=1, max_size=6).map(tuple)


@given(lengths)
def test_every_place_knows_its_document(lengths):
    documents = Documents.from_lengths(lengths)
    places = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    assert documents.document_ids.tolist() == [number for number, _ in places]
    assert documents.positions.tolist() == [place for _, place in places]
    assert documents.begins.tolist() == [sum(lengths[:number]) for number, _ in places]
    assert documents.ends.tolist() == [sum(lengths[: number + 1]) for number, _ in places]


@given(lengths, st.integers(0, 9), st.booleans())
def test_ahead_is_ahead_in_every_document_by_itself(lengths, distance, mask):
    documents = Documents.from_lengths(lengths)
    values = torch.arange(1, 2 * sum(lengths) + 1).view(2, -1)
    values = values % 2 == 0 if mask else values
    fill = False if mask else -1
    expected = [part[distance:] + [fill] * min(distance, len(part)) for part in _lists(documents.split(values))]
    assert _lists(documents.split(documents.shift_left(values, distance, fill))) == expected


@given(lengths)
def test_runs_are_the_documents_in_order_with_equal_neighbours_together(lengths):
    runs = Documents.from_lengths(lengths).runs
    assert tuple(run.length for run in runs for _ in range(run.count)) == lengths
    assert [run.begin for run in runs] == [sum(r.count * r.length for r in runs[:i]) for i in range(len(runs))]
    assert all(first.length != second.length for first, second in zip(runs, runs[1:]))


def test_a_row_that_is_one_document_is_one_run():
    assert Documents.from_lengths((9,)).runs == (Run(0, 1, 9),)


def _lists(parts: list[torch.Tensor]) -> list[list]:
    return [part.tolist() for part in parts]
