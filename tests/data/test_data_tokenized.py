"""Tokenized sets: what was written is there, in any order under the same digest, without copies."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.tokenized import TokenizedSet, TokenRow, cut_to_length, write_tokens
from draftworks.errors import DataError, StoreError

tokens = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=8)


def row(sample_id: str, pairs: list[tuple[int, bool]], **columns) -> TokenRow:
    ids, mask = ([pair[n] for pair in pairs] for n in (0, 1))
    return TokenRow(sample_id, np.array(ids, np.int32), np.array(mask, bool), columns)


sets = st.dictionaries(st.text(alphabet="abcdef0123456789", min_size=1), tokens, min_size=1, max_size=6).map(
    lambda found: [row(sample_id, pairs, n=len(pairs)) for sample_id, pairs in found.items()]
)
ONE = [row("a", [(1, True), (2, False)]), row("b", [(3, True)])]


def same(one: TokenRow, other: TokenRow) -> bool:
    return (
        one.sample_id == other.sample_id
        and np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.loss_mask, other.loss_mask)
        and dict(one.columns) == dict(other.columns)
    )


@given(sets)
def test_written_rows_are_read_as_they_were(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("tokens")
    summary = write_tokens(folder, rows)
    opened = TokenizedSet.open(folder)
    assert len(opened) == len(rows) == summary["samples"]
    assert all(same(opened.row(n), each) and same(opened.by_id(each.sample_id), each) for n, each in enumerate(rows))
    assert opened.lengths.tolist() == [len(each) for each in rows]
    assert opened.sample_ids == tuple(each.sample_id for each in rows)
    assert opened.columns == [dict(each.columns) for each in rows]
    assert summary["tokens"] == len(opened.flat_ids) == sum(map(len, rows))
    assert summary["supervised_tokens"] == opened.flat_mask.sum()
    assert summary["longest"] == max(map(len, rows))


@given(sets, st.randoms())
def test_digest_is_of_the_content_whatever_the_order(tmp_path_factory, rows, random):
    folder = tmp_path_factory.mktemp("tokens")
    first = write_tokens(folder / "a", rows)["digest"]
    assert first == write_tokens(folder / "b", random.sample(rows, len(rows)))["digest"]
    longer = [*rows[:-1], row(rows[-1].sample_id, [*zip(rows[-1].input_ids, rows[-1].loss_mask), (0, False)])]
    flipped = [
        *rows[:-1],
        row(rows[-1].sample_id, [(i, not m) for i, m in zip(rows[-1].input_ids, rows[-1].loss_mask)]),
    ]
    assert first != write_tokens(folder / "c", longer)["digest"]
    assert (first != write_tokens(folder / "d", flipped)["digest"]) == bool(len(rows[-1]))


def test_rows_are_read_only_views_of_one_array(tmp_path):
    write_tokens(tmp_path, (row(str(n), [(n, True)] * 3) for n in range(3000)))
    opened = TokenizedSet.open(tmp_path)
    sample = opened.row(2500)
    assert np.shares_memory(sample.input_ids, opened.flat_ids)
    assert np.shares_memory(sample.loss_mask, opened.flat_mask)
    assert sample.loss_mask.dtype == np.bool_
    with pytest.raises(ValueError, match="read-only"):
        sample.input_ids[0] = 1
    assert len(list(opened)) == 3000


def test_an_unknown_sample_is_an_error(tmp_path):
    write_tokens(tmp_path, ONE)
    opened = TokenizedSet.open(tmp_path)
    with pytest.raises(StoreError, match="sample nobody is not among the 2"):
        opened.by_id("nobody")
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} of 2"):
            opened.row(index)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no tokenized sample to write"),
        ([ONE[0], ONE[0]], "two tokenized samples have the id a"),
        ([TokenRow("a", np.array([1, 2]), np.array([True]))], "sample a: 2 ids but 1 mask entries"),
    ],
)
def test_rows_that_make_no_set_are_an_error_and_publish_nothing(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path, rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["missing", "truncated", "altered", "no summary", "other columns"])
def test_a_damaged_set_is_a_store_error(tmp_path, harm):
    write_tokens(tmp_path, ONE)
    path = tmp_path / "tokens.parquet"
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif harm == "altered":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif harm == "no summary":
        (tmp_path / "summary.json").unlink()
    else:
        pq.write_table(pq.read_table(path).drop(["columns"]), path)
    with pytest.raises(StoreError, match=str(tmp_path)):
        TokenizedSet.open(tmp_path)


@given(tokens.filter(lambda pairs: any(on for _, on in pairs)), st.integers(1, 10))
def test_a_cut_is_counted_and_never_takes_the_last_supervised_token(pairs, length):
    whole = row("a", pairs)
    if not any(on for _, on in pairs[:length]):
        with pytest.raises(DataError, match=f"no supervised token in the first {length} of {len(pairs)}"):
            cut_to_length(whole, length)
        return
    fitted = cut_to_length(whole, length)
    assert len(fitted.row) == min(length, len(pairs))
    assert fitted.was_cut == (len(pairs) > length)
    assert fitted.row.supervised + fitted.cut_supervised == whole.supervised
