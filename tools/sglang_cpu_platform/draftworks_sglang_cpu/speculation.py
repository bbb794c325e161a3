"""What keeps SGLang 0.5.23 from speculating on a CPU, and the little it takes. All maths stays SGLang's own."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn


def cache_locations(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **_: Any
) -> Tensor:
    """Where the tokens [start, end) of each request are in the cache, one request after another; int64.

    SGLang asks a platform for this; its other forms are kernels of known devices.
    """
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans]).long()


def choose_triton_trees() -> None:
    """Let EAGLE use SGLang's own Triton kernels for trees of proposals, those that it uses on Intel's GPUs.

    Which form it takes depends on the device, with none for a platform from outside and no way to name one: so the two
    names are bound anew, here and nowhere else.
    """
    from sglang.kernels.ops.speculative import spec_tree  # pyright: ignore[reportMissingImports]
    from sglang.srt.speculative import eagle_utils  # pyright: ignore[reportMissingImports]

    @wraps(spec_tree.verify_tree_greedy_func)
    def verify(*, topk: int = -1, **tensors: Tensor) -> tuple[Tensor, ...]:
        spec_tree.verify_tree_greedy_triton(**tensors)
        return tensors["predicts"], tensors["accept_index"], tensors["accept_token_num"]

    eagle_utils.build_tree_kernel_efficient_func = spec_tree.sgl_build_tree_kernel_triton
    eagle_utils.verify_tree_greedy_func = verify


class Streamless(Tensor):
    """A CPU tensor that takes no notice of CUDA's streams; what is computed from it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType] - torch documents this

    def record_stream(self, s: object) -> None:
        pass


def cpu_dflash_worker() -> type:
    """SGLang's worker for DFlash, without the stream it names on every device."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2  # pyright: ignore[reportMissingImports]

    class CpuDFlashWorker(DFlashWorkerV2):
        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.seq_lens is not None:
                batch.seq_lens = batch.seq_lens.as_subclass(Streamless)
            return super().forward_batch_generation(batch, *args, **kwargs)

    return CpuDFlashWorker


def keep_own_dtype(draft: nn.Module) -> None:
    """SGLang hands embeddings to a DFlash draft in bfloat16; its first layer gets them in the draft's own dtype."""

    def converted(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        dtype = next(layer.parameters()).dtype
        return tuple(_in(dtype, value) for value in args), {key: _in(dtype, value) for key, value in kwargs.items()}

    draft.get_submodule("layers.0").register_forward_pre_hook(converted, with_kwargs=True)


def _in(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
