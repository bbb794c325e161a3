"""SGLang's layer ids and the limits of its capture, by the architecture of a target. Torch-free.

An id of SGLang names the layer whose output is captured, and each model class converts it into a number of layers
passed by adding 1. For an EAGLE-3 draft, the DeepSeek-like classes add 1 only if the first id is 1; otherwise they take
the ids as numbers of layers passed. For DFlash they always add 1, as all other classes do. Source: SGLang 0.5.23,
`set_eagle3_layers_to_capture` of models/deepseek_v2.py and models/glm4_moe_lite.py, and the classes that inherit from
them or delegate to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.storage.hub import fetch_hub_file
from draftworks.storage.identity import LayerTap
from draftworks.targets.resolve import read_text_config

FIRST_ID_DECIDES_COUNTING = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
"""Architectures whose EAGLE-3 ids name layers (0-based) if the first id is 1, and count layers passed otherwise."""


ATTENTION_DP = ("--enable-dp-attention", "--attn-dp-size")

_EAGLE3 = (
    "Apertus BailingMoE BailingMoe BailingMoeV2 DeepseekV2 DeepseekV3 DeepseekV32 ExaoneMoE ExaoneMoe Gemma3 Gemma4 "
    "Glm4Moe Glm4MoeLite GlmMoeDsa GptOss IQuestCoder InternLM3 Llama4 Llama LongcatFlash Mellum MiniMaxM2 "
    "MiniMaxM3Sparse Ministral3 Mistral MistralLarge3 Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe "
    "SarvamMoE TeleFLM"
)
_EAGLE3_WRAPPERS = (
    "Cosmos3 Gemma3 Gemma4 Gemma4Unified Glm5Next InternS1Pro InternS2Mobius InternS2Preview KimiK25 Llama4 "
    "MiniMaxM3Sparse Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp"
)
_DFLASH = "Beam KimiK3Linear Laguna Lfm2 Lfm2Moe MiMoV2 MiMoV2Flash MuseGlimmer Nanbeige NemotronH NemotronHPuzzle"
_DFLASH_WRAPPERS = "Inkling KimiK3 Lfm2Vl MuseGlimmer MuseSpark"


def _make_class_names(text_models: str, wrappers: str) -> frozenset[str]:
    text = {f"{name}ForCausalLM" for name in text_models.split()}
    return frozenset(text | {f"{name}ForConditionalGeneration" for name in wrappers.split()})


CAPTURED_FOR_EAGLE3 = _make_class_names(_EAGLE3, _EAGLE3_WRAPPERS)
"""Architectures whose class in SGLang 0.5.23 accepts a list of layers to capture for an EAGLE-3 draft."""
CAPTURED_FOR_DFLASH_ONLY = _make_class_names(_DFLASH, _DFLASH_WRAPPERS)


def read_architecture(target: TargetFiles) -> str:
    """Return the first of `architectures` in the target's config.json; empty if it names none or cannot be read."""
    path: Path | None = Path(target.model) / "config.json"
    if target.revision is not None:
        path = fetch_hub_file(f"target {target.name}", target.model, target.revision, "config.json")
    try:
        architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures") if path is not None else None
    except (OSError, ValueError, AttributeError):
        return ""  # the code that loads the target reports what is wrong with the file
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def choose_capture_convention(architecture: str) -> str:
    """Return the speculative algorithm for which SGLang adds 1 to every layer id, whatever the ids are."""
    return "DFLASH" if architecture in FIRST_ID_DECIDES_COUNTING | CAPTURED_FOR_DFLASH_ONLY else "EAGLE3"


def check_capture(where: str, architecture: str, args: Sequence[str]) -> None:
    """Raise ConfigError if a server that Draftworks starts cannot capture the target: architecture or `args`.

    Args:
        where: the target as error messages name it, such as "target mine".
        args: additional arguments of the server.
    """
    if architecture and architecture not in CAPTURED_FOR_EAGLE3 | CAPTURED_FOR_DFLASH_ONLY:
        raise ConfigError(
            f"{where}: capture.backend: SGLang 0.5.23 cannot capture layers of a {architecture}. Use backend hf. If a "
            "newer SGLang can capture them, start that server yourself and set capture.server.url"
        )
    groups = [word for word in args if word.partition("=")[0] in ATTENTION_DP]
    if groups:
        raise ConfigError(
            f"{where}: capture.server.args: {', '.join(groups)}: with attention data parallelism only the first of "
            "all ranks writes hidden states, so most samples would have none. Remove it; capture.server.dp_size makes "
            "copies of the target"
        )


def resolve_captured_layers(ids: Sequence[int], convention: str | None, architecture: str) -> tuple[int, ...]:
    """Return the layers (0-based) whose outputs SGLang captures for these ids; -1 is the embeddings.

    Args:
        convention: as the server reports it, `eagle3` or `dflash`; None if it does not report one.
    """
    counts_passed_layers = (
        architecture in FIRST_ID_DECIDES_COUNTING and convention != "dflash" and bool(ids) and ids[0] != 1
    )
    return tuple(sorted(layer - 1 if counts_passed_layers else layer for layer in ids))


def to_eagle3_ids(taps: Sequence[LayerTap], architecture: str) -> list[int]:
    """Return the layer ids for an EAGLE-3 draft's config with which SGLang feeds it these taps.

    Raises:
        ConfigError: no ids select these taps.
    """
    outputs = [tap.to_layer_output() for tap in taps]
    if architecture not in FIRST_ID_DECIDES_COUNTING or outputs[0] == 1:
        return outputs
    passed = [tap.hf_index for tap in taps]
    if passed[0] == 1:
        raise ConfigError(
            f"SGLang cannot serve an EAGLE-3 draft of {', '.join(tap.name for tap in taps)} beside a {architecture}: "
            "it adds 1 to all ids if the first is 1, and to none otherwise. Choose taps that do not begin with hf1"
        )
    return passed


def from_eagle3_ids(ids: Sequence[int], architecture: str) -> tuple[LayerTap, ...]:
    """Return the taps that SGLang feeds an EAGLE-3 draft with these ids: the inverse of `to_eagle3_ids`."""
    return tuple(LayerTap.from_layer_output(layer) for layer in resolve_captured_layers(ids, "eagle3", architecture))


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
