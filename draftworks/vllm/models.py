"""Of which targets vLLM can capture hidden states, by the class that it runs them with. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.errors import ConfigError
from draftworks.vllm.environment import VLLM_VERSIONS

_TEXT_MODELS = (
    "Afmoe Apertus Cohere2Moe Deepseek DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DeepseekV41 Ernie4_5 Gemma4 "
    "Glm5Next GlmMoeDsa GptOss Granite GraniteSWA IQuestCoder InternLM3 K2Horizon KimiLinear LLaMA Laguna Llama "
    "Llama4 MiMo MiMoV2 MiMoV2Flash MiMoV2Omni MiniCPM MiniCPM3 MiniMaxM2 MiniMaxM3Sparse Ministral3 Mistral "
    "MistralLarge3 MuseGlimmer NemotronH NemotronHPuzzle Phi3 Plamo3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 "
    "Qwen3_5Moe SarvamMLA Step1 TeleChat2 TeleChat3 TeleFLM"
)
_WRAPPERS = (
    "CohereCompass Cosmos3 DeepseekV4 Exaone4_5_ Gemma4 Gemma4Unified Glm5Next InternS1Pro InternS2Mobius "
    "InternS2Preview KimiK25 KimiK3 LightOnOCR Llama4 Llava MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse Mistral3 "
    "MuseGlimmer OpenCUA Pixtral Qwen2_5_VL Qwen3ASR Qwen3OmniMoe Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp"
)
CAPTURED = frozenset(
    [*(f"{name}ForCausalLM" for name in _TEXT_MODELS.split())]
    + [*(f"{name}ForConditionalGeneration" for name in _WRAPPERS.split())]
)
"""Architectures whose class in vLLM 0.32.0 is a SupportsEagle3, which is what `extract_hidden_states` asks of it."""


def check_capture(where: str, architecture: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM cannot capture a target's layers.

    Args:
        where: the target as error messages name it, such as "target mine".
        architecture: the first of the target's config.json; empty if it is not known.
        config: of its text model.
    """
    tested = f"vLLM {' and '.join(VLLM_VERSIONS)}"
    if architecture and architecture not in CAPTURED:
        raise ConfigError(
            f"{where}: capture.backend: {tested} cannot capture layers of a {architecture}: its class is no SupportsEagle3. "
            "Use backend hf, or sglang_server"
        )
    if config.get("kv_lora_rank"):
        raise ConfigError(
            f"{where}: capture.backend: {tested} keeps no hidden states beside compressed keys and values (MLA: kv_lora_rank "
            f"{config['kv_lora_rank']}). Use backend hf, or sglang_server"
        )
