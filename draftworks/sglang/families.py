"""Known limitations of SGLang by model family, found by running version 0.5.23; see docs/sglang.md. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.targets.resolve import read_text_config

_TESTED = "SGLang 0.5.23"
_DELTA_NET = (
    "its gated DeltaNet kernels are written in Triton, and Triton's interpreter fails on one of their data types"
)
_NOT_ON_CPU = {
    "gpt_oss": "its CPU attention does not support sinks",
    "deepseek_v3": "its CPU attention does not support compressed keys and values (MLA)",
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA_NET),
}
"""Model types that SGLang does not run on a CPU, with the reason."""
_SUBLAYERS = ("gemma3", "gemma3_text")
"""Model types for which SGLang returns the output of the last sublayer instead of the residual stream."""
_WITHOUT_WINDOW = ("mistral",)
"""Model types that SGLang runs with full attention, whatever sliding window their config sets."""


def refuse_on_cpu(spec: TargetSpec, files: TargetFiles) -> None:
    """Raise ConfigError if the target is to be captured with SGLang on a CPU and SGLang cannot run it there."""
    if not _uses_sglang(spec) or spec.capture.device != "cpu":
        return
    kind = read_text_config(files).get("model_type")
    if kind in _NOT_ON_CPU:
        raise ConfigError(
            f"target {spec.name}: capture.backend {spec.capture.backend} on a CPU: {_TESTED} does not run {kind} "
            f"there: {_NOT_ON_CPU[kind]}. Set capture.backend to hf, or capture on a GPU"
        )


def list_sglang_remarks(spec: TargetSpec, files: TargetFiles) -> list[str]:
    """Return warnings for the user before SGLang captures or serves this target; other versions may do better."""
    config, remarks = read_text_config(files), []
    kind, window = config.get("model_type"), _find_window(config)
    if kind in _SUBLAYERS:
        remarks.append(
            f"target {spec.name}: for {kind}, {_TESTED} returns the last sublayer's output, not the residual stream: "
            "capture with backend hf, and expect low acceptance where it serves the draft"
        )
    if kind in _WITHOUT_WINDOW and window is not None and window < spec.max_length and _uses_sglang(spec):
        remarks.append(
            f"target {spec.name}: {_TESTED} runs {kind} without its sliding window of {window} tokens, and max_length "
            f"is {spec.max_length}: answers and features of longer samples are those of another model. Capture with "
            "backend hf"
        )
    return remarks


def _uses_sglang(spec: TargetSpec) -> bool:
    return spec.capture.backend in ("sglang", "sglang_server")


def _find_window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    return window if isinstance(window, int) else None
