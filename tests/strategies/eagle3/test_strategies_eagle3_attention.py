from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ttt_toys import outputs_and_gradients, random_inputs, sizes

from draftworks.drafts.documents import Documents
from draftworks.errors import ConfigError
from draftworks.strategies.eagle3.attention import (
    _FusedTttAttention,
    eager_ttt_attention,
    flex_ttt_attention,
    fused_kernel_works,
    fused_ttt_attention,
    sdpa_ttt_attention,
    ttt_attention,
)

CPU = torch.device("cpu")
SIX = Documents.from_lengths((6,))


@pytest.mark.skipif(not fused_kernel_works(CPU, torch.float64, 4), reason="this torch lacks the fused CPU kernel")
@given(size=sizes, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_fused_equals_eager_in_value_and_every_gradient(size, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for found, expected in zip(
        outputs_and_gradients(fused_ttt_attention, size, dtype), outputs_and_gradients(eager_ttt_attention, size, dtype)
    ):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=20)
@given(size=sizes)
def test_sdpa_equals_eager_in_value_and_every_gradient(size):
    for found, expected in zip(
        outputs_and_gradients(sdpa_ttt_attention, size, torch.float64),
        outputs_and_gradients(eager_ttt_attention, size, torch.float64),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    "size", [(2, 2, 2, (7,), 8, 3), (1, 1, 1, (130,), 16, 1), (1, 1, 3, (80, 3, 67), 16, 4)], ids=str
)
@pytest.mark.parametrize("bounds", [(), (5,)], ids=["all", "window"])
def test_flex_equals_eager(size, bounds):
    query, *rest = (x.detach() for x in random_inputs(*size, torch.float32)[1])
    keys, values = rest[: size[-1]], rest[size[-1] :]
    documents = Documents.from_lengths(size[3])
    attends = (flex_ttt_attention, eager_ttt_attention)
    found, expected = (attend(query, keys, values, documents, *bounds) for attend in attends)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("lengths", [(11,), (4, 10, 5)], ids=["one", "several"])
def test_a_row_sees_the_window_that_ends_with_it_and_its_own_later_keys(backend, lengths):
    documents, window = Documents.from_lengths(lengths), 3
    _, (query, *rest) = random_inputs(1, 2, 2, lengths, 4, 3, torch.float64)
    changed, row = [x.detach().clone() for x in rest], 7
    for x in (changed[0], changed[3]):  # keys and values of step 0
        x[:, :, : row - window + 1] += 5
        x[:, :, row + 1 :] -= 5
    for x in (*changed[1:3], *changed[4:]):
        x[:, :, :row] += 5
        x[:, :, row + 1 :] -= 5
    found = [ttt_attention(query, x[:3], x[3:], documents, backend, window)[:, :, row] for x in (rest, changed)]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    wider = ttt_attention(query, changed[:3], changed[3:], documents, backend, window + 1)[:, :, row]
    assert not torch.allclose(found[0], wider)


def test_a_window_that_leaves_nothing_out_costs_nothing(monkeypatch):
    _, (query, *rest) = random_inputs(1, 1, 1, (6,), 4, 2, torch.float32)
    fused = "draftworks.strategies.eagle3.attention.fused_ttt_attention"
    monkeypatch.setattr(fused, lambda query, keys, values, documents: query + 1)
    assert torch.equal(ttt_attention(query, rest[:2], rest[2:], SIX, window=6), query + 1)
    assert not torch.equal(ttt_attention(query, rest[:2], rest[2:], SIX, window=5), query + 1)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "flex"])
def test_every_back_end_is_the_one_named(backend, monkeypatch):
    _, (query, *rest) = random_inputs(1, 1, 1, (6,), 4, 2, torch.float32)
    used = {"auto": "fused", "sdpa": "sdpa", "eager": "eager", "flex": "flex"}[backend]
    module = "draftworks.strategies.eagle3.attention"
    monkeypatch.setattr(f"{module}.{used}_ttt_attention", lambda query, keys, values, documents: query + 1)
    with torch.no_grad():
        assert torch.equal(ttt_attention(query, rest[:2], rest[2:], SIX, backend), query + 1)


def test_flex_with_gradients_on_a_cpu_is_refused():
    _, (query, *rest) = random_inputs(1, 1, 1, (6,), 4, 2, torch.float32)
    with pytest.raises(ConfigError, match="eagle3: attention flex has no gradients on a CPU: set options.attention"):
        ttt_attention(query, rest[:2], rest[2:], SIX, "flex")


def test_fused_equals_eager_beyond_one_block_of_the_kernel():
    size = (1, 1, 2, (800,), 8, 4)
    for found, expected in zip(
        outputs_and_gradients(fused_ttt_attention, size, torch.float64),
        outputs_and_gradients(eager_ttt_attention, size, torch.float64),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_later_rows_other_samples_and_other_documents_are_never_seen(backend):
    documents = Documents.from_lengths((4, 10, 5))
    _, (query, *rest) = random_inputs(2, 2, 2, documents.lengths, 4, 3, torch.float64)
    query, rest = query.detach(), [x.detach().clone() for x in rest]
    before = ttt_attention(query, rest[:3], rest[3:], documents, backend)
    for x in rest:
        x[:, :, 10:14] += 5
        x[1] -= 2
    after = ttt_attention(query, rest[:3], rest[3:], documents, backend)
    same = torch.tensor([True] * 10 + [False] * 4 + [True] * 5)
    torch.testing.assert_close(before[0, :, same], after[0, :, same], rtol=0, atol=0)
    assert not torch.allclose(before[0, :, ~same], after[0, :, ~same])


def test_without_the_private_kernel_auto_is_sdpa(monkeypatch):
    size = (2, 2, 2, (4, 3), 4, 3)
    expected = outputs_and_gradients(ttt_attention, size, torch.float64)
    fused_kernel_works.cache_clear()

    def absent(*_args, **_kwargs):
        raise AttributeError("no such operator")

    monkeypatch.setattr(_FusedTttAttention, "forward", staticmethod(absent))
    try:
        assert not fused_kernel_works(CPU, torch.float64, 4)
        for found, value in zip(outputs_and_gradients(ttt_attention, size, torch.float64), expected):
            torch.testing.assert_close(found, value)
    finally:
        fused_kernel_works.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("head_size", [6, 64, 128])
def test_probe_accepts_a_right_kernel_at_every_head_size(dtype, head_size):
    assert fused_kernel_works(CPU, dtype, head_size)


def test_a_device_without_a_kernel_is_told():
    assert not fused_kernel_works(torch.device("meta"), torch.bfloat16, 8)
