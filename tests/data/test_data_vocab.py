"""Properties of the draft vocabulary."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.vocab import VocabMapping, build_vocab_mapping, count_supervised_tokens
from draftworks.errors import ConfigError, DataError, StoreError

counts_and_size = st.lists(st.integers(0, 5), min_size=1, max_size=60).flatmap(
    lambda counts: st.tuples(st.just(np.array(counts)), st.integers(1, len(counts)))
)


@given(counts_and_size)
def test_d2t_and_t2d_name_the_same_ids_in_ascending_order(case):
    counts, size = case
    mapping = build_vocab_mapping(counts, size)
    assert mapping.d2t.dtype == np.int64
    assert mapping.t2d.dtype == np.bool_
    assert len(mapping.d2t) == size == mapping.t2d.sum()
    np.testing.assert_array_equal(mapping.target_ids, np.flatnonzero(mapping.t2d))


@given(counts_and_size)
def test_kept_ids_are_those_of_the_reference_definition(case):
    """Most common first, padded with ids of range(V_d) at count 0; ties here by lowest id."""
    counts, size = case
    counter = Counter({token: int(n) for token, n in enumerate(counts) if n})
    if len(counter) < size:
        counter.update({token: 0 for token in range(size) if token not in counter})
    expected = sorted(counter, key=lambda token: (-counter[token], token))[:size]
    assert build_vocab_mapping(counts, size).target_ids.tolist() == sorted(expected)


@given(counts_and_size)
def test_coverage_is_the_best_of_any_set_of_that_size_and_grows_with_it(case):
    counts, size = case
    mapping = build_vocab_mapping(counts, size)
    best = np.sort(counts)[::-1][:size].sum() / max(counts.sum(), 1)
    assert mapping.measure_coverage(counts) == pytest.approx(best)


@given(counts_and_size)
def test_saved_mapping_is_loaded_as_it_was(tmp_path_factory, case):
    path = tmp_path_factory.mktemp("vocab") / "vocab.safetensors"
    mapping = build_vocab_mapping(*case)
    mapping.save(path)
    loaded = VocabMapping.load(path)
    np.testing.assert_array_equal(loaded.d2t, mapping.d2t)
    np.testing.assert_array_equal(loaded.t2d, mapping.t2d)
    assert loaded.digest == mapping.digest
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("size", [0, 5])
def test_a_draft_vocabulary_larger_than_the_targets_or_empty_is_an_error(size):
    with pytest.raises(ConfigError, match=f"draft_vocab_size {size} .*vocabulary of 4"):
        build_vocab_mapping(np.ones(4), size)


def test_only_supervised_tokens_are_counted(tmp_path):
    rows = [
        TokenRow("a", np.array([1, 2, 2, 3], np.int32), np.array([0, 1, 1, 1], bool)),
        TokenRow("b", np.array([2, 0], np.int32), np.array([1, 0], bool)),
    ]
    write_tokens(tmp_path, rows)
    tokens = TokenizedSet.open(tmp_path)
    assert count_supervised_tokens(tokens, 5).tolist() == [0, 0, 3, 1, 0]
    with pytest.raises(DataError, match="vocabulary 3 ids: it belongs to another target"):
        count_supervised_tokens(tokens, 3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": np.zeros(2, np.int64)}, "expected the tensors d2t and t2d"),
        ({"d2t": np.zeros(2, np.int32), "t2d": np.ones(2, bool)}, "expected d2t as int64"),
        ({"d2t": np.zeros((2, 1), np.int64), "t2d": np.ones(2, bool)}, "of one dimension"),
        ({"d2t": np.array([0, 1]), "t2d": np.array([True, True, False])}, "different tokens"),
        ({"d2t": np.array([0, 9]), "t2d": np.array([True, True, False])}, "different tokens"),
    ],
)
def test_an_inconsistent_mapping_is_a_store_error(tmp_path, tensors, message):
    path = tmp_path / "vocab.safetensors"
    save_file(tensors, path)
    with pytest.raises(StoreError, match=message):
        VocabMapping.load(path)


def test_a_missing_or_truncated_mapping_is_a_store_error(tmp_path):
    path = tmp_path / "vocab.safetensors"
    with pytest.raises(StoreError, match="cannot be read"):
        VocabMapping.load(path)
    build_vocab_mapping(np.arange(100), 50).save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError, match="cannot be read"):
        VocabMapping.load(path)
