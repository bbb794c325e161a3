"""The adapters of torch's fused kernels: each gets what its operator wants, and is taken only once it has shown that it is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode
from ttt_toys import outputs_and_gradients, random_inputs, sizes

from draftworks.drafts.documents import Documents
from draftworks.drafts.flash_kernels import (
    CAUSAL_KERNELS,
    PACKED_KERNELS,
    PIECE,
    Attended,
    ByDocument,
    CpuFlash,
    CpuMaskedFlash,
    CudaFlash,
    CudaVarlenFlash,
    MaskedKernel,
    choose_masked_kernel,
)
from draftworks.strategies.eagle3.attention import (
    _FusedTttAttention,
    eager_ttt_attention,
    fused_kernel_works,
    fused_ttt_attention,
    packed_kernel_works,
)

CPU = torch.device("cpu")
ROW = Documents.from_lengths((4, 3, 3))
CUDA_KERNELS = {
    "one document": CudaFlash(),
    "by document": ByDocument(CudaFlash(), ROW),
    "packed": CudaVarlenFlash(ROW),
}


@pytest.mark.parametrize("kernel", CUDA_KERNELS)
@pytest.mark.parametrize("steps", [1, 3])
def test_cuda_adapters_fit_the_declarations_of_their_operators(steps, kernel):
    """Shapes and arguments only, on the meta device: numbers need a GPU (tests/gpu)."""
    leaves, (query, *rest) = random_inputs(2, 2, 2, ROW.lengths, 8, steps, torch.bfloat16)
    moved = [x.detach().to("meta").requires_grad_() for x in (query, *rest)]
    kernel = CUDA_KERNELS[kernel]
    output = _FusedTttAttention.apply(kernel, moved[0], steps, *moved[1:])
    assert output.shape == query.shape
    for grad, leaf in zip(torch.autograd.grad(output, moved, torch.empty_like(output)), moved, strict=True):
        assert grad.shape == leaf.shape


@pytest.mark.parametrize("length", [PIECE, PIECE + 1, 2 * PIECE + 5])
def test_causal_attention_in_pieces_is_that_of_the_whole(length):
    size = (2, 2, 2, (length,), 4, 2)
    found = outputs_and_gradients(fused_ttt_attention, size, torch.float64)
    for one, other in zip(found, outputs_and_gradients(eager_ttt_attention, size, torch.float64), strict=True):
        torch.testing.assert_close(one, other)


class LogSumExpAt(TorchDispatchMode):
    """Fails where CUDA's backward, which reads the log-sum-exp by its address, is given a strided one."""

    backward = (
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
        torch.ops.aten._flash_attention_backward.default,
    )
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.backward:
            assert args[5].is_contiguous()
            self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kernel", "calls"), [("one document", 1), ("by document", 2), ("packed", 1)])
def test_cuda_backward_gets_a_contiguous_log_sum_exp(kernel, calls):
    _, (query, *rest) = random_inputs(2, 2, 2, ROW.lengths, 8, 3, torch.bfloat16)
    moved = [x.detach().to("meta").requires_grad_() for x in (query, *rest)]
    output = _FusedTttAttention.apply(CUDA_KERNELS[kernel], moved[0], 3, *moved[1:])
    with LogSumExpAt() as backward:
        torch.autograd.grad(output, moved, torch.empty_like(output))
    assert backward.seen == calls


class ByOffsets(TorchDispatchMode):
    """Stands in for the operators on packed rows, whose numbers need a GPU: torch's kernel, document by document."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._flash_attention_forward.default:
            query, key, value, offsets = args[:4]
            found = [CpuFlash().forward(*part) for part in self.documents(offsets, query, key, value)]
            output = torch.cat([one.output[0].transpose(0, 1) for one in found])
            lse = torch.cat([one.lse[0] for one in found], dim=1)
            return output, lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)
        if func is torch.ops.aten._flash_attention_backward.default:
            grad, query, key, value, output, lse, offsets = args[:7]
            parts = []
            for *inputs, out, row in self.documents(offsets, grad, query, key, value, output, lse.T[..., None]):
                attended = Attended(out, row[..., 0].contiguous())
                parts.append(CpuFlash().backward(*inputs, attended))
            return tuple(torch.cat([x[0].transpose(0, 1) for x in found]) for found in zip(*parts))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def documents(offsets, *tensors):
        """Each document by itself, as a batch of one: (1, heads, its length, D)."""
        sizes = offsets.diff().tolist()
        split = [x.transpose(0, 1)[None].split(sizes, dim=2) for x in tensors]
        return zip(*split, strict=True)


@settings(max_examples=20)
@given(size=sizes)
def test_packed_rows_in_one_launch_are_the_documents_by_themselves(size):
    """All of the adapter but the operators themselves: what goes where, in value and every gradient."""

    def packed(query, keys, values, documents):
        return _FusedTttAttention.apply(CudaVarlenFlash(documents), query, len(keys), *keys, *values)

    with ByOffsets():
        found = outputs_and_gradients(packed, size, torch.float64)
    for one, expected in zip(found, outputs_and_gradients(eager_ttt_attention, size, torch.float64)):
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)


class Counted(ByDocument):
    """A kernel for whole packed rows, as it may be on a device."""

    calls = 0

    def __init__(self, documents):
        super().__init__(CpuFlash(), documents)

    def forward(self, query, key, value):
        type(self).calls += 1
        return super().forward(query, key, value)


class Wrong(Counted):
    def forward(self, query, key, value):
        attended = super().forward(query, key, value)
        return attended._replace(output=attended.output + 1)


@pytest.mark.parametrize(("kernel", "taken"), [(Counted, True), (Wrong, False)])
def test_a_kernel_for_packed_rows_is_taken_once_it_has_shown_that_it_is_right(kernel, taken, monkeypatch):
    monkeypatch.setitem(PACKED_KERNELS, "cpu", kernel)
    monkeypatch.setattr(kernel, "calls", 0)
    packed_kernel_works.cache_clear()
    try:
        found = outputs_and_gradients(fused_ttt_attention, (1, 1, 2, (4, 3), 8, 2), torch.float64)
    finally:
        packed_kernel_works.cache_clear()
    assert kernel.calls == (2 if taken else 1)
    for one, expected in zip(found, outputs_and_gradients(eager_ttt_attention, (1, 1, 2, (4, 3), 8, 2), torch.float64)):
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_with_a_mask_is_that_of_plain_autograd_where_it_is_taken(dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, count, 6, generator=generator) for heads, count in ((4, 9), (2, 14), (2, 14))]
    query, key, value = inputs = [x.to(dtype) for x in inputs]
    seen = torch.rand(2, 1, 9, 14, generator=generator) < 0.5
    seen[..., 0] = True
    kernel = choose_masked_kernel("cpu", dtype, 6)
    assert isinstance(kernel, CpuMaskedFlash)
    results = []
    for one in (kernel, MaskedKernel()):
        attended = one.forward(*inputs, seen)
        results.append([attended.output, *one.backward(query.cos(), *inputs, seen, attended)])
    scores = query.double() @ key.repeat_interleave(2, dim=1).double().mT / 6**0.5
    plain = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value.repeat_interleave(2, dim=1).double()
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(results[0], results[1], **tolerance)
    torch.testing.assert_close(results[0][0].double(), plain, **tolerance)


def test_a_private_operator_that_is_missing_or_wrong_is_not_taken(monkeypatch):
    find = choose_masked_kernel.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(CpuMaskedFlash, "backward", lambda self, grad, *_: [x * 1.01 for x in (grad, grad, grad)])
        assert type(find("cpu", torch.float32, 8)) is MaskedKernel

    def missing(*_):
        raise AttributeError("no such operator")

    monkeypatch.setattr(CpuMaskedFlash, "forward", missing)
    assert type(find("cpu", torch.float32, 8)) is MaskedKernel
