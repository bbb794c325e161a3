from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftworks.drafts.objectives import make_teacher_plan, specforge_label_mask, token_mean_label_mask

masks = st.lists(st.booleans(), min_size=1, max_size=12)


def test_token_mean_supervises_what_a_server_would_propose():
    # tokens:              0  1  2  3  4  5  6       the answer is 2, 3, 4
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0]]).bool()
    label_mask = token_mean_label_mask(mask, 3).int().tolist()
    assert label_mask[0] == [[0, 1, 1, 0, 0, 0, 0]]  # after the target said 2, row 1 proposes 3; row 2 proposes 4
    assert label_mask[1] == [[0, 1, 0, 0, 0, 0, 0]]  # row 1 goes on to 4; row 2 would propose 5, beyond the answer
    assert label_mask[2] == [[0, 0, 0, 0, 0, 0, 0]]


def test_specforge_gates_are_the_mask_shifted_by_the_step():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0]]).bool()
    label_mask = specforge_label_mask(mask, 3).int().tolist()
    assert label_mask == [[[0, 0, 1, 1, 1, 0, 0]], [[0, 1, 1, 1, 0, 0, 0]], [[1, 1, 1, 0, 0, 0, 0]]]


@given(masks, st.integers(1, 14))
def test_a_row_supervised_at_a_step_was_supervised_at_every_earlier_one(mask, steps):
    label_mask = token_mean_label_mask(torch.tensor([mask]), steps)
    assert label_mask.shape == (steps, 1, len(mask))
    assert all((later <= earlier).all() for earlier, later in zip(label_mask, label_mask[1:]))


@given(masks, masks, st.integers(1, 14), st.booleans())
def test_teacher_plan_lists_every_gated_row_once_under_its_teacher_position(first, second, steps, specforge):
    length = max(len(first), len(second))
    mask = torch.tensor([row + [False] * (length - len(row)) for row in (first, second)])
    mask[:, -1] &= not specforge
    label_mask = (specforge_label_mask if specforge else token_mean_label_mask)(mask, steps)
    plan = make_teacher_plan(label_mask)
    for step in range(steps):
        taught = plan.draft_positions[step] >= 0
        rows = plan.draft_positions[step][taught]
        assert rows.tolist() == label_mask[step].flatten().nonzero().squeeze(1).tolist()
        assert (plan.teacher_positions[taught] == rows + 1 + step).all()
        assert (plan.teacher_positions[taught] // length == rows // length).all()
    assert ((plan.draft_positions >= 0).any(0)).all()
