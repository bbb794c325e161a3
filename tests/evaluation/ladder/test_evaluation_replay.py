"""Rungs 2 and 3 count what a server would accept, compared with a server's arithmetic token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.replay import replay
from draftworks.features.contracts import TrainBatch


@dataclass(frozen=True)
class Scripted:
    """A draft with a fixed proposal for every position."""

    proposals: Tensor

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        return self.proposals[:, :, :count].masked_fill(~position_mask[..., None], -1)


class Counted(NamedTuple):
    passes: int
    accepted: int
    emitted: int


def counted(found: PromptAcceptance) -> Counted:
    return Counted(found.passes, found.accepted, found.emitted)


def answers_of(mask: list[int]) -> list[range]:
    """Return the positions of every run of answer tokens."""
    found, begin = [], None
    for place, on in enumerate([*mask, 0]):
        if on and begin is None:
            begin = place
        elif not on and begin is not None:
            found.append(range(begin, place))
            begin = None
    return found


def served(ids: list[int], answer: range, proposals: list[list[int]], known: int) -> Counted:
    """One pass of a server that has decided all tokens up to position `known`; the draft is asked at the one before."""
    proposed, accepted = proposals[max(known - 1, 0)], 0
    while accepted < len(proposed) and known + 1 + accepted < answer.stop:
        if proposed[accepted] != ids[known + 1 + accepted]:
            break
        accepted += 1
    left = answer.stop - known - 1
    return Counted(1, accepted, min(accepted + 1, left))


def total(passes: list[Counted]) -> Counted:
    return Counted(*(sum(each) for each in zip(*passes))) if passes else Counted(0, 0, 0)


def by_hand(ids: list[int], mask: list[int], proposals: list[list[int]]) -> tuple[Counted, Counted]:
    """Return the passes of one sample: at every token of its answers but the last, and those of a server."""
    blocks, walk = [], []
    for answer in answers_of(mask):
        first = max(answer.start, 1)  # nothing can be said before there is a row
        blocks += [served(ids, answer, proposals, known) for known in range(first, answer.stop - 1)]
        known = first
        while known < answer.stop - 1:
            walk.append(served(ids, answer, proposals, known))
            known += walk[-1].accepted + 1
    return total(blocks), total(walk)


def replayed(ids: list[int], mask: list[int], proposals: list[list[int]]) -> tuple[Counted, Counted]:
    tensors = {"input_ids": torch.tensor([ids]), "loss_mask": torch.tensor([mask], dtype=torch.bool)}
    batch = TrainBatch(tensors, ("s",), len(ids))
    [found] = replay(Scripted(torch.tensor([proposals])), batch, len(proposals[0]))
    return counted(found.blocks), counted(found.walk)


def test_of_a_perfect_draft_every_answer_is_walked_by_itself_and_nothing_after_its_end_counts():
    ids, mask = [7, 1, 2, 3, 9, 9, 4, 5, 6, 8], [0, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    padded = [*ids, 0, 0, 0, 0]
    perfect = [padded[row + 2 : row + 5] for row in range(len(ids))]  # also of what the user says next
    blocks, walk = replayed(ids, mask, perfect)
    # After 1: 2 3 and not the 9 that follows. After 2: 3. After 4: 5 6 8. After 5: 6 8. After 6: 8.
    assert blocks == Counted(passes=5, accepted=2 + 1 + 3 + 2 + 1, emitted=2 + 1 + 3 + 2 + 1)
    assert walk == Counted(passes=2, accepted=2 + 3, emitted=2 + 3)


token = st.integers(0, 2)
texts = st.integers(1, 14).flatmap(
    lambda length: st.tuples(
        st.lists(token, min_size=length, max_size=length),
        st.lists(st.sampled_from([0, 1, 1, 1]), min_size=length, max_size=length),
        st.lists(st.lists(token, min_size=3, max_size=3), min_size=length, max_size=length),
    )
)


@given(text=texts)
def test_counts_are_those_of_a_server_pass_by_pass(text):
    assert replayed(*text) == by_hand(*text)
