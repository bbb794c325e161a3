"""Packing: every document once, none over the limit, rows that are full, and the same plan wherever it is made."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftworks.errors import ConfigError, DataError
from draftworks.features.contracts import FeatureSpec, SampleRef
from draftworks.features.schedule import (
    MicroBatch,
    PackedEvaluationSchedule,
    PackedTrainSchedule,
    PackLimits,
    PaddedTrainSchedule,
    fill_share,
    pack_rows,
    require_lengths,
)

GENERATOR = np.random.default_rng(0)
CUT_AT_128 = tuple(np.minimum(GENERATOR.integers(33, 190, 977), 128).tolist())
"""As those of the embedded target: 33 tokens and more, and many cut where samples end."""
HEAVY_TAIL = tuple(np.clip(GENERATOR.lognormal(6, 1, 2000), 16, 4096).astype(int).tolist())

documents = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def tokens(row: tuple[int, ...], lengths) -> int:
    return sum(lengths[index] for index in row)


def schedule(lengths: tuple[int, ...], limit: int, batch: int, rank: int = 0, world: int = 1) -> PackedTrainSchedule:
    return PackedTrainSchedule(
        samples=len(lengths),
        lengths=lengths,
        pack_tokens=limit,
        global_batch_size=batch,
        rank=rank,
        world=world,
        seed=3,
    )


def windows(batches) -> list[list[MicroBatch]]:
    """Step by step."""
    found: list[list[MicroBatch]] = [[]]
    for batch in batches:
        found[-1].append(batch)
        if batch.ends_step:
            found.append([])
    assert found.pop() == []
    return found


@given(documents, st.integers(60, 200), st.integers(1, 5))
def test_every_document_is_in_one_row_and_no_row_over_the_limit(lengths, limit, multiple):
    rows = pack_rows(lengths, limit, multiple)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(tokens(row, lengths) <= limit for row in rows)
    assert len(rows) % multiple == 0
    assert sum(not row for row in rows) == max(0, len(rows) - len(lengths))
    assert rows == pack_rows(lengths, limit, multiple)


@given(documents, st.integers(60, 200), st.integers(1, 5))
def test_rows_are_not_many_more_than_the_documents_fill(lengths, limit, multiple):
    """Any two rows hold more than the limit together, or best fit would have made one of them."""
    rows = pack_rows(lengths, limit, multiple)
    assert len(rows) <= 2 * -(-sum(lengths) // limit) + multiple


@given(documents, st.integers(1, 59), st.integers(1, 4))
def test_a_document_over_the_limit_is_alone_in_its_row(lengths, limit, multiple):
    rows = pack_rows(lengths, limit, multiple)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(len(row) <= 1 or tokens(row, lengths) <= limit for row in rows)


@pytest.mark.parametrize(
    ("lengths", "limit", "batch"),
    [(CUT_AT_128, 512, 64), (CUT_AT_128, 1024, 16), (CUT_AT_128, 1024, 64), (HEAVY_TAIL, 8192, 64)],
    ids=["tiny 512x64", "tiny 1024x16", "tiny 1024x64", "heavy tail 8192x64"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_ragged_lengths_are_97_percent_full(lengths, limit, batch, world):
    """Against the longest of the same step, which is what the other ranks would wait for."""
    one = schedule(lengths, limit, batch, world=world)
    assert np.mean([fill_share(one.pack_step(samples), lengths) for samples in one.samples_of_steps(0)]) >= 0.97


def test_rows_of_a_large_batch_are_97_percent_full_against_the_limit_too():
    rows = pack_rows(CUT_AT_128, 1024)
    assert sum(CUT_AT_128) / (len(rows) * 1024) >= 0.97


@example([1] * 12, 60, 4, 3)  # best fit alone would leave the third rank without a sample
@given(
    st.lists(st.integers(1, 60), min_size=12, max_size=40), st.integers(60, 150), st.integers(3, 12), st.integers(1, 3)
)
def test_ranks_have_equally_many_rows_of_the_very_samples_of_the_padded_step(lengths, limit, batch, world):
    lengths = tuple(lengths)
    ranks = [windows(schedule(lengths, limit, batch, rank, world).batches(1)) for rank in range(world)]
    padded = PaddedTrainSchedule(samples=len(lengths), micro_batch_size=batch, global_batch_size=batch, seed=3)
    expected = [sorted(each.indices) for each in padded.batches(1)]
    assert {len(rank) for rank in ranks} == {len(expected)}
    for step, samples in enumerate(expected):
        assert len({len(rank[step]) for rank in ranks}) == 1
        real = [each for rank in ranks for each in rank[step] if not each.padding]
        assert sorted(index for each in real for index in each.indices) == samples
        assert all(any(not each.padding for each in rank[step]) for rank in ranks)


@given(st.integers(0, 5), st.integers(0, 3))
def test_what_comes_after_some_steps_is_the_rest_of_the_epoch(after, epoch):
    one = schedule(CUT_AT_128[:40], 256, 8, rank=1, world=2)
    assert windows(one.batches(epoch))[after:] == windows(one.batches(epoch, after))


def test_epochs_differ_and_a_plan_is_made_step_by_step():
    one = schedule(CUT_AT_128, 1024, 16)
    assert list(islice(one.batches(0), 9)) != list(islice(one.batches(1), 9))
    assert list(islice(one.batches(0), 9)) == list(islice(schedule(CUT_AT_128, 1024, 16).batches(0), 9))


@given(documents, st.integers(60, 200), st.integers(1, 4))
def test_an_evaluation_takes_every_sample_once_in_equally_many_rows(lengths, limit, world):
    ranks = [
        list(PackedEvaluationSchedule(lengths=tuple(lengths), pack_tokens=limit, rank=rank, world=world).batches())
        for rank in range(world)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    real = [index for rank in ranks for batch in rank if not batch.padding for index in batch.indices]
    assert sorted(real) == list(range(len(lengths)))


@pytest.mark.parametrize("world", [1, 2])
def test_an_evaluation_of_nothing_has_no_batches(world):
    schedule = PackedEvaluationSchedule(lengths=(), pack_tokens=64, world=world)
    assert (schedule.steps, list(schedule.batches())) == (0, [])


def test_an_idle_rank_joins_with_the_shortest_sample():
    ranks = [windows(schedule((50, 48, 55), 60, 3, rank, 2).batches(0)) for rank in range(2)]
    batches = [batch for (step,) in ranks for batch in step]
    assert sorted((batch.indices, batch.padding) for batch in batches) == [
        ((0,), False), ((1,), False), ((1,), True), ((2,), False),
    ]  # fmt: skip


def refs(*lengths: int) -> list[SampleRef]:
    return [SampleRef(f"s{n}", "", "", "", {}, {}, num_tokens=length) for n, length in enumerate(lengths)]


def test_a_sample_over_the_limit_is_refused_by_name_or_has_a_row_of_its_own():
    with pytest.raises(
        DataError, match=r"2 of 4 samples .* pack_tokens 64; the longest is s3 with 90 tokens.*at least 90.*own_row"
    ):
        require_lengths(refs(3, 70, 64, 90), PackLimits(64))
    lengths = require_lengths(refs(3, 70, 64, 90), PackLimits(64, "own_row"))
    assert pack_rows(lengths, 64) == [(3,), (1,), (2,), (0,)]


def test_lengths_are_those_of_the_features_where_nobody_counted():
    spec = FeatureSpec("last", (17, 4), "float32")
    assert require_lengths([SampleRef("s", "", "", "", {"last": "k"}, {"last": spec})], PackLimits(64)) == (17,)
    with pytest.raises(DataError, match="sample s: its reference does not say how many tokens"):
        require_lengths([SampleRef("s", "", "", "", {}, {})], PackLimits(64))


def test_more_ranks_than_samples_in_a_step_are_refused():
    with pytest.raises(ConfigError, match="global_batch_size 2 gives 3 ranks less than a sample each"):
        schedule((5, 5, 5), 64, 2, world=3)
