"""Adapters of torch's fused attention kernels with their backward, causal or masked, one per kind of device.

The operators are private to torch, so they may change without notice: draftworks.strategies.eagle3.attention probes the
causal ones before relying on them, and `choose_masked_kernel` the masked ones. The CUDA adapters have been checked
against the operators' declarations only, never on a GPU.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.documents import Documents, Run


class Attended(NamedTuple):
    """Output (B, heads, S, D), log-sum-exp of its scaled scores (B, heads, S), and what else the backward needs."""

    output: Tensor
    lse: Tensor
    rest: tuple[Any, ...] = ()


class Gradients(NamedTuple):
    """Gradients of query, key and value, in their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor


class CausalKernel(ABC):
    """Causal attention scaled by D^-1/2. Query (B, heads, S, D); key, value (B, kv_heads, S, D)."""

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended: ...

    @abstractmethod
    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        """Return the gradients. Any of the tensors may be strided.

        The kernel rebuilds its probabilities as exp(scores - attended.lse) and uses `attended.output` as given.
        """


PIECE = 128
"""Queries that `CpuFlash` takes at a time."""


class CpuFlash(CausalKernel):
    """Flash attention of the CPU: any floating dtype, any head size.

    Keys go through the operator 512 at a time, and none are left out within these. So a piece of the queries attends to
    the keys of its own positions, causally, and to all before them, without a mask; both are merged by log-sum-exp.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, sums = torch.empty_like(query), []
        for at, before in _pieces(query.shape[2]):
            own, lse = attend(query[:, :, at], key[:, :, at], value[:, :, at], 0.0, is_causal=True)
            if before.stop:
                earlier, lse_before = attend(query[:, :, at], key[:, :, before], value[:, :, before])
                own_lse, lse = lse, torch.logaddexp(lse, lse_before)
                own = torch.lerp(earlier.to(lse.dtype), own.to(lse.dtype), (own_lse - lse).exp_().unsqueeze(-1))
            output[:, :, at] = own
            sums.append(lse)
        return Attended(output, torch.cat(sums, dim=2))

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for at, before in _pieces(query.shape[2]):
            rows = [x[:, :, at] for x in (grad, query)]
            merged = (attended.output[:, :, at], attended.lse[:, :, at], 0.0)
            own = Gradients(*backward(*rows, key[:, :, at], value[:, :, at], *merged, True))
            d_query[:, :, at] = own.query
            d_key[:, :, at] += own.key
            d_value[:, :, at] += own.value
            if before.stop:
                both = (key[:, :, before], value[:, :, before])
                earlier = Gradients(*backward(*rows, *both, *merged, False))
                d_query[:, :, at] += earlier.query
                d_key[:, :, before] += earlier.key
                d_value[:, :, before] += earlier.value
        return Gradients(d_query, d_key, d_value)


def _pieces(length: int) -> Iterator[tuple[slice, slice]]:
    """Yield `PIECE` positions at a time, and all before them."""
    for start in range(0, max(length, 1), PIECE):
        yield slice(start, min(start + PIECE, length)), slice(0, start)


class CudaFlash(CausalKernel):
    """Flash attention of CUDA: float16 and bfloat16; head sizes that are multiples of 8, up to 256."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        output, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal=True)
        sequence_ends_and_lengths, dropout_state = rest[:4], rest[4:6]
        return Attended(output, lse, (*sequence_ends_and_lengths, 0.0, True, *dropout_state))

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        lse = (
            attended.lse.contiguous()
        )  # the operator reads it by address and ignores strides; it copies the others as needed
        return Gradients(
            *torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, attended.output, lse, *attended.rest
            )
        )


class CudaVarlenFlash(CausalKernel):
    """All documents of packed rows in one launch, each attending to itself; dtypes and head sizes as `CudaFlash`."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        layout = self._layout(query.shape[0])
        tokens = (_as_tokens(x) for x in (query, key, value))
        output, lse, *rest = torch.ops.aten._flash_attention_forward(*tokens, *layout, 0.0, True, False)
        random_state = rest[:2]
        lse = lse.unflatten(1, (query.shape[0], -1)).transpose(0, 1)  # (heads, B · S) to (B, heads, S)
        return Attended(_as_heads(output, query.shape[0]), lse, (*layout, 0.0, True, *random_state))

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        tokens = (_as_tokens(x) for x in (grad, query, key, value, attended.output))
        lse = attended.lse.transpose(0, 1).flatten(1).contiguous()
        gradients = torch.ops.aten._flash_attention_backward(*tokens, lse, *attended.rest)
        return Gradients(*(_as_heads(x, query.shape[0]) for x in gradients))

    def _layout(self, batch_rows: int) -> tuple[Tensor, Tensor, int, int]:
        """Cumulative lengths and longest length of the documents of all batch rows; for queries, then for keys."""
        offsets, longest = self._documents.cu_seqlens(batch_rows), self._documents.longest
        return offsets, offsets, longest, longest


def _as_tokens(x: Tensor) -> Tensor:
    """(B, heads, S, D) to (B · S, heads, D), without a copy where positions are outermost in memory."""
    return x.transpose(1, 2).flatten(0, 1)


def _as_heads(x: Tensor, batch_rows: int) -> Tensor:
    """(B · S, heads, D) to (B, heads, S, D)."""
    return x.unflatten(0, (batch_rows, -1)).transpose(1, 2)


class ByDocument(CausalKernel):
    """Another causal kernel, run document by document; consecutive documents of equal length form one batch."""

    def __init__(self, kernel: CausalKernel, documents: Documents) -> None:
        self._kernel = kernel
        self._runs = documents.runs

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        parts = [self._kernel.forward(*(_cut_run(x, run) for x in (query, key, value))) for run in self._runs]
        output = _join_runs([part.output for part in parts], self._runs, query)
        lse = _join_runs([part.lse for part in parts], self._runs, query)
        return Attended(output, lse, tuple(part.rest for part in parts))

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        parts = []
        for run, rest in zip(self._runs, attended.rest, strict=True):
            of_run = [_cut_run(x, run) for x in (grad, query, key, value)]
            mine = Attended(_cut_run(attended.output, run), _cut_run(attended.lse, run), rest)
            parts.append(self._kernel.backward(of_run[0], of_run[1], of_run[2], of_run[3], mine))
        return Gradients(*(_join_runs(found, self._runs, query) for found in zip(*parts, strict=True)))


def _cut_run(x: Tensor, run: Run) -> Tensor:
    """Cut (B, heads, S, …) to the documents of a run, (B · count, heads, length, …); without a copy where B is 1."""
    part = x[:, :, run.span]
    return part if run.count == 1 else part.unflatten(2, (run.count, run.length)).transpose(1, 2).flatten(0, 1)


def _join_runs(parts: Sequence[Tensor], runs: Sequence[Run], query: Tensor) -> Tensor:
    """Inverse of `_cut_run` over all runs; positions are outermost in memory."""
    batch, length, heads = query.shape[0], query.shape[2], parts[0].shape[1]
    whole = parts[0].new_empty(batch, length, heads, *parts[0].shape[3:]).transpose(1, 2)
    for part, run in zip(parts, runs, strict=True):
        documents = part.unflatten(0, (batch, run.count)).transpose(1, 2)
        whole[:, :, run.span].unflatten(2, (run.count, run.length)).copy_(documents)
    return whole


CAUSAL_KERNELS: dict[str, CausalKernel] = {"cpu": CpuFlash(), "cuda": CudaFlash()}
"""By device type; other devices have none."""
PACKED_KERNELS: dict[str, Callable[[Documents], CausalKernel]] = {"cuda": CudaVarlenFlash}
"""Kernels for batch rows of several documents, by device type; other devices go `ByDocument`."""


class MaskedKernel:
    """Attention with a mask (B, 1, n, m) bool by the kernel torch chooses; the backward recomputes the forward."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Attended:
        # No masked GPU kernel accepts fewer key heads than query heads.
        if query.device.type == "cuda":
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        fewer = key.shape[1] != query.shape[1]
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=fewer)
        return Attended(output, query.new_empty(0))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, attended: Attended
    ) -> Gradients:
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        with torch.enable_grad():
            output = self.forward(query, key, value, seen).output
        return Gradients(*torch.autograd.grad(output, (query, key, value), grad))


class CpuMaskedFlash(MaskedKernel):
    """Masked flash attention of the CPU; the backward rebuilds probabilities from the log-sum-exp."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Attended:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return Attended(*forward(query, key, value, attn_mask=_to_additive(seen, query.dtype)))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, attended: Attended
    ) -> Gradients:
        backward, mask = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
            _to_additive(seen, grad.dtype),
        )
        return Gradients(*backward(grad, query, key, value, attended.output, attended.lse, 0.0, False, attn_mask=mask))


def _to_additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    nothing = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, nothing, nothing.log())


@functools.cache
def choose_masked_kernel(device_type: str, dtype: torch.dtype, head_size: int) -> MaskedKernel:
    """Return the fastest masked kernel; one that is private to torch is probed once per dtype and head size."""
    plain, fast = MaskedKernel(), CpuMaskedFlash()
    return fast if device_type == "cpu" and _equal(fast, plain, dtype, head_size) else plain


def _equal(fast: MaskedKernel, plain: MaskedKernel, dtype: torch.dtype, head_size: int) -> bool:
    """Compare output and gradients of two kernels on a small batch row."""
    tolerance, generator = 0.05 if dtype.itemsize == 2 else 1e-4, torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, head_size, generator=generator).to(dtype) for heads in (4, 2, 2))
    seen = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    try:
        attended = fast.forward(query, key, value, seen)
        found = [attended.output, *fast.backward(query, query, key, value, seen, attended)]
    except (AttributeError, RuntimeError, TypeError):  # an operator that is missing, or has other arguments
        return False
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        output = plain.forward(leaves[0], leaves[1], leaves[2], seen).output
        # The gradient of a product, not `plain.backward`: torch imports sympy to check a gradient that it is given.
        expected = [output, *torch.autograd.grad((output * query).sum(), leaves)]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(found, expected, strict=True))
