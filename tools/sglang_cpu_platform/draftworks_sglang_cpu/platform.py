"""What SGLang 0.5.23 asks of a platform, for a CPU with nothing but torch."""

from __future__ import annotations

from collections.abc import Callable

import triton  # pyright: ignore[reportMissingImports]
from sglang.srt.platforms.cpu import CpuDeviceMixin  # pyright: ignore[reportMissingImports]
from sglang.srt.platforms.device_mixin import PlatformEnum  # pyright: ignore[reportMissingImports]
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

TRITON = "triton"
SPECULATION = ("EAGLE", "EAGLE3", "DFLASH")


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out of tree, so that every fused operation falls back to its plain torch form; no graphs.

    SGLang speculates with Triton kernels. With TRITON_INTERPRET=1 Triton interprets them on the CPU: slow, and the real
    thing. Without it speculation is refused.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return bool(triton.knobs.runtime.interpret) and algorithm in SPECULATION

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == TRITON

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return TRITON

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        from draftworks_sglang_cpu.speculation import cache_locations

        return cache_locations

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Asked once, where a worker is about to be made."""
        from draftworks_sglang_cpu.speculation import choose_triton_trees, cpu_dflash_worker

        choose_triton_trees()
        return cpu_dflash_worker() if algorithm == "DFLASH" else None

    def post_load_model(self, model: nn.Module) -> None:
        from draftworks_sglang_cpu.speculation import keep_own_dtype

        if type(model).__name__ == "DFlashDraftModel":
            keep_own_dtype(model)
