from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from draftworks.drafts.documents import Documents
from draftworks.drafts.flash_kernels import CAUSAL_KERNELS, ByDocument, CpuFlash, CudaFlash
from draftworks.drafts.ttt_attention import ttt_attention
from draftworks.drafts.ttt_fused import _FusedTttAttention, fused_kernel_works, fused_ttt_attention
from draftworks.drafts.ttt_masked import eager_ttt_attention, flex_ttt_attention, sdpa_ttt_attention
from draftworks.errors import ConfigError

CPU = torch.device("cpu")
SIX = Documents.after_each_other((6,))


def random_inputs(batch, kv_heads, group, lengths, dim, steps, dtype):
    """For rows that hold documents of these lengths."""
    length = sum(lengths)
    generator = torch.Generator().manual_seed(length + steps)
    full = (batch, length, kv_heads * group, dim)
    shapes = [full, *[(batch, length, kv_heads, dim), *[full] * (steps - 1)] * 2]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return leaves, [leaf.transpose(1, 2) for leaf in leaves]


def outputs_and_gradients(attend, size, dtype):
    leaves, (query, *rest) = random_inputs(*size, dtype)
    steps = size[-1]
    output = attend(query, rest[:steps], rest[steps:], Documents.after_each_other(size[3]))
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    return [output, *torch.autograd.grad(output, leaves, seed)]


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)
sizes = st.tuples(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), lengths, st.integers(1, 9), st.integers(1, 8)
)


@pytest.mark.skipif(not fused_kernel_works(CPU, torch.float64, 4), reason="this torch lacks the fused CPU kernel")
@settings(max_examples=30, deadline=None)
@given(size=sizes, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_fused_equals_eager_in_value_and_every_gradient(size, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for found, expected in zip(
        outputs_and_gradients(fused_ttt_attention, size, dtype), outputs_and_gradients(eager_ttt_attention, size, dtype)
    ):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=20, deadline=None)
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
def test_flex_equals_eager(size):
    query, *rest = (x.detach() for x in random_inputs(*size, torch.float32)[1])
    keys, values = rest[: size[-1]], rest[size[-1] :]
    documents = Documents.after_each_other(size[3])
    found, expected = (attend(query, keys, values, documents) for attend in (flex_ttt_attention, eager_ttt_attention))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "flex"])
def test_every_back_end_is_the_one_named(backend, monkeypatch):
    _, (query, *rest) = random_inputs(1, 1, 1, (6,), 4, 2, torch.float32)
    used = {"auto": "fused", "sdpa": "sdpa", "eager": "eager", "flex": "flex"}[backend]
    module = "draftworks.drafts.ttt_attention"
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
    documents = Documents.after_each_other((4, 10, 5))
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_cuda_adapter_fits_the_declarations_of_its_operators(steps, packed):
    """Shapes and arguments only, on the meta device: numbers need a GPU."""
    leaves, (query, *rest) = random_inputs(2, 2, 2, (4, 3, 3), 8, steps, torch.bfloat16)
    moved = [x.detach().to("meta").requires_grad_() for x in (query, *rest)]
    kernel = ByDocument(CudaFlash(), Documents.after_each_other((4, 3, 3))) if packed else CudaFlash()
    output = _FusedTttAttention.apply(kernel, moved[0], steps, *moved[1:])
    assert output.shape == query.shape
    for grad, leaf in zip(torch.autograd.grad(output, moved, torch.empty_like(output)), moved, strict=True):
        assert grad.shape == leaf.shape


class LogSumExpAt(TorchDispatchMode):
    """Fails where CUDA's backward, which reads the log-sum-exp by its address, is given a strided one."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            assert args[5].is_contiguous()
            self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("lengths", "calls"), [((10,), 1), ((4, 3, 3), 2)])
def test_cuda_backward_gets_a_contiguous_log_sum_exp(lengths, calls):
    _, (query, *rest) = random_inputs(2, 2, 2, lengths, 8, 3, torch.bfloat16)
    moved = [x.detach().to("meta").requires_grad_() for x in (query, *rest)]
    kernel = ByDocument(CudaFlash(), Documents.after_each_other(lengths))
    output = _FusedTttAttention.apply(kernel, moved[0], 3, *moved[1:])
    with LogSumExpAt() as backward:
        torch.autograd.grad(output, moved, torch.empty_like(output))
    assert backward.seen == calls


class BlindToStrides(CpuFlash):
    """Reads the log-sum-exp by its address, as CUDA's operator does."""

    def backward(self, grad, query, key, value, attended):
        lse = attended.lse
        plain = torch.empty(lse.shape).stride()
        return super().backward(
            grad, query, key, value, attended._replace(lse=lse.as_strided(lse.shape, plain).clone())
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_refuses_a_kernel_that_is_right_for_one_document_alone(dtype, monkeypatch):
    monkeypatch.setitem(CAUSAL_KERNELS, "cpu", BlindToStrides())
    fused_kernel_works.cache_clear()
    try:
        assert not fused_kernel_works(CPU, dtype, 8)
    finally:
        fused_kernel_works.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex"])
def test_cuda_back_ends_equal_eager(backend, dtype):
    device = torch.device("cuda")
    assert fused_kernel_works(device, dtype, 64)
    documents = Documents.after_each_other((170, 65, 65), device)
    _, inputs = random_inputs(2, 2, 2, documents.lengths, 64, 3, dtype)
    results = []
    for name in (backend, "eager"):
        leaves = [x.detach().to(device).requires_grad_() for x in inputs]
        output = ttt_attention(leaves[0], leaves[1:4], leaves[4:], documents, name)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
