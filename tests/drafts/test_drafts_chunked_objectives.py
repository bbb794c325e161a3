"""Objectives go chunk by chunk: no tensor of anchors x vocabulary is ever held, and no number depends on the chunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from coverings import cover, gate_or_long
from objective_toys import ANSWER, HIDDEN, SIZES, Case, batch_of, in_blocks, list_choices, logits_at_once, strategy_of
from strategy_cases import find_cases
from torch import Tensor

from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.drafts.layers import argmax_of_head
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.features.contracts import TrainBatch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OBJECTIVES = [Case(name, options) for name, cases in find_cases().items() for options in cases.objectives]
STRATEGIES = [Case(strategy) for strategy in SIZES]

MIDWAY = StepContext(global_step=1, total_steps=4, training=True)
"""Where both losses of Domino count."""
VOCAB, FLOAT = 1024, 4
"""The first is doubled; and the bytes of a number."""
CHUNK_LOGITS, CHUNK_BLOCKS = 16 * VOCAB, 4
CHUNK_COPIES, HEAD_COPIES = 6, 4
"""Tensors as large as the logits of a chunk, and as large as a head, that may be held at once."""
STREAMS = 64
"""States as wide as the draft that a label may cost, of all layers and with their gradients. Its logits would be as many."""


def train(strategy: DraftStrategy, batch: TrainBatch) -> StepOutput:
    output = strategy.forward_loss(batch, MIDWAY)
    output.loss_sum.backward()
    return output


@torch.no_grad()
def evaluate(strategy: DraftStrategy, batch: TrainBatch) -> StepOutput:
    return strategy.forward_loss(batch, replace(MIDWAY, training=False))


def propose(strategy: DraftStrategy, batch: TrainBatch) -> Tensor:
    everywhere = torch.ones(batch["input_ids"].shape, dtype=torch.bool)
    return strategy.propose(batch, everywhere, strategy.draft_tokens)


WORKS = [
    *((case, train) for case in OBJECTIVES),
    *((case, work) for case in STRATEGIES for work in (evaluate, propose)),
]


class Sizes(NamedTuple):
    """Of a batch, and of the target."""

    samples: int
    vocab: int


class Peaks(NamedTuple):
    """The most bytes held at once, beyond what was there before, by size.

    Attributes:
        samples: of the smaller batch.
        labels: of the smaller batch.
        chunk_rows: whose logits a chunk has; 0 where it has fewer the larger the vocabulary is.
    """

    by_size: Mapping[Sizes, int]
    samples: int
    labels: int
    chunk_rows: int

    def of_samples(self, vocab: int) -> int:
        """What twice the samples cost more."""
        return self.by_size[Sizes(2 * self.samples, vocab)] - self.by_size[Sizes(self.samples, vocab)]

    def of_vocabulary(self, samples: int) -> int:
        """What twice the vocabulary costs more."""
        return self.by_size[Sizes(samples, 2 * VOCAB)] - self.by_size[Sizes(samples, VOCAB)]


@pytest.fixture(scope="module")
def peak_bytes() -> Iterator[Callable[[Callable[[], object]], int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from peak_memory import peak_bytes

        yield peak_bytes


def is_in_gate(work: tuple[Case, Callable[..., object]]) -> bool:
    """Each strategy trains. Evaluating goes through the same chunks without their gradients, and proposals through the same
    search for first choices: one of a kind does.
    """
    case, what = work
    if what is evaluate:
        return case.strategy in {"eagle3", "peagle", "dflash"}
    if what is propose:
        return case.strategy in {"eagle3", "peagle", "dspark", "dflash2"}
    firsts = {each.strategy: each for each in reversed(OBJECTIVES)}
    others = ({"weighting": "dpace"}, {"markov_head_type": "rnn", "gamma": 2.0})
    return case == firsts[case.strategy] or (case.strategy in {"dflash", "dspark"} and case.options in others)


@pytest.fixture(
    scope="module",
    params=gate_or_long(map(pytest.param, WORKS), is_in_gate),
    ids=lambda work: f"{work[0]}-{work[1].__name__}",
)
def peaks(request: pytest.FixtureRequest, peak_bytes: Callable[[Callable[[], object]], int]) -> Peaks:
    case, work = request.param
    blocks, samples = in_blocks(case.strategy), 1 if work is train else 2
    more = {"objective_chunk_blocks": CHUNK_BLOCKS} if blocks else {}
    by_size = {}
    with logits_at_once(CHUNK_LOGITS, CHUNK_BLOCKS):
        for size in itertools.starmap(Sizes, itertools.product((samples, 2 * samples), (VOCAB, 2 * VOCAB))):
            strategy = strategy_of(case, size.vocab, **more)
            batch = batch_of(strategy, size.samples, size.vocab)
            by_size[size] = peak_bytes(lambda: work(strategy, batch))  # noqa: B023
    labels = samples * ANSWER * strategy.draft_tokens
    return Peaks(by_size, samples, labels, CHUNK_BLOCKS * strategy.draft_tokens if blocks else 0)


def test_every_strategy_is_looked_at() -> None:
    built_in = {name for name in list_strategies() if resolve_strategy(name).factory.startswith("draftworks.")}
    built_in -= {"mtp"}  # a layer of the target's own, which the targets of these tests have not
    assert built_in == set(SIZES) == {case.strategy for case in OBJECTIVES}


def test_what_a_label_costs_does_not_depend_on_the_vocabulary(peaks: Peaks) -> None:
    logits = peaks.labels * VOCAB * FLOAT
    assert peaks.of_samples(2 * VOCAB) - peaks.of_samples(VOCAB) < 0.02 * logits


def test_a_label_costs_states_only(peaks: Peaks) -> None:
    assert max(map(peaks.of_samples, (VOCAB, 2 * VOCAB))) < STREAMS * peaks.labels * HIDDEN * FLOAT


def test_a_larger_vocabulary_costs_a_chunk_and_heads_only(peaks: Peaks) -> None:
    most = (CHUNK_COPIES * peaks.chunk_rows + HEAD_COPIES * HIDDEN) * VOCAB * FLOAT
    assert max(map(peaks.of_vocabulary, (peaks.samples, 2 * peaks.samples))) < most


def test_finding_first_choices_holds_no_more_logits_for_more_states(peak_bytes) -> None:
    head, states = torch.randn(VOCAB, HIDDEN), torch.randn(400, HIDDEN)
    with logits_at_once(CHUNK_LOGITS, CHUNK_BLOCKS):
        few, many = (peak_bytes(lambda: argmax_of_head(head, states[:rows])) for rows in (200, 400))  # noqa: B023
    assert CHUNK_LOGITS * FLOAT <= many < 2 * CHUNK_LOGITS * FLOAT
    assert many - few <= 2 * 200 * 8


SMALL_VOCAB, MANY = 40, 10**6
MODES = [
    Case(case.strategy, {**case.options, "loss": loss}) for case in OBJECTIVES for loss in ("token_mean", "specforge")
]


class Outcome(NamedTuple):
    """Of training on a batch, of evaluating on it, and of proposing everywhere in it."""

    trained: StepOutput
    gradients: Mapping[str, Tensor]
    evaluated: StepOutput
    proposals: Tensor


def outcome(case: Case, chunk: int) -> Outcome:
    """With so many blocks, or teacher's rows, at a time."""
    more = {"objective_chunk_blocks": chunk} if in_blocks(case.strategy) else {}
    strategy = strategy_of(case, SMALL_VOCAB, torch.float64, **more)
    batch = batch_of(strategy, 3, SMALL_VOCAB, holes=0.2)
    with logits_at_once(chunk * SMALL_VOCAB, chunk):
        trained = train(strategy, batch)
        gradients = {name: weight.grad for name, weight in strategy.model.named_parameters() if weight.requires_grad}
        return Outcome(trained, gradients, evaluate(strategy, batch), propose(strategy, batch))


# A loss decides what the terms are divided by, not how they are computed: each objective with one of both.
@pytest.mark.parametrize("case", gate_or_long(MODES, cover(MODES, list_choices)), ids=str)
def test_the_size_of_a_chunk_changes_nothing(case: Case) -> None:
    whole = outcome(case, MANY)
    for chunk in (1, 7):
        cut = outcome(case, chunk)
        for found, expected in ((cut.trained, whole.trained), (cut.evaluated, whole.evaluated)):
            same(found.loss_sum, expected.loss_sum)
            same(found.loss_weight, expected.loss_weight)
            assert found.metric_sums.keys() == expected.metric_sums.keys()
            for name, count in expected.metric_sums.items():
                same(found.metric_sums[name], count)
        for name, gradient in whole.gradients.items():
            assert gradient.any(), name
            same(cut.gradients[name], gradient)
        assert torch.equal(cut.proposals, whole.proposals)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
