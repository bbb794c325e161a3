"""What a server says of itself: its engine, how it drafts, which weights. Read from pages; standard library only.

Pages and fields are those of vLLM 0.32 (`/version`; `/server_info` and `/weight_info` in development mode), SGLang 0.5.23
(`/server_info`, `/model_info`) and llama.cpp b11434 (`/props`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftworks.production.requests import Engine

INFO, VERSION, MODEL, WEIGHTS, PROPS = (
    "/server_info?config_format=json", "/version", "/model_info", "/weight_info", "/props",
)  # fmt: skip
PAGES = (INFO, VERSION, MODEL, WEIGHTS, PROPS)
_LOSSY_VLLM = ("synthetic", "fly")
"""Values of vLLM's rejection_sample_method that change what is answered."""
_SGLANG_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class ServingFacts:
    """How a server speculates; None where it does not say.

    Attributes:
        method: its name for the way of drafting.
        draft: path or name of the draft model, as the server was given it.
        draft_tokens: tokens that it proposes at most in a pass.
        target: path or name of its model.
        runner: which of vLLM's model runners was asked for, `v1` or `v2`.
        weight_version: as it was told with weights that were exchanged.
        lossy: whether its rule of acceptance changes what is answered.
    """

    engine: Engine | None = None
    version: str | None = None
    method: str | None = None
    draft: str | None = None
    draft_tokens: int | None = None
    target: str | None = None
    runner: str | None = None
    weight_version: str | None = None
    lossy: bool | None = None

    @classmethod
    def of(cls, pages: Mapping[str, Mapping[str, Any]]) -> ServingFacts:
        """Return what pages say, by their path; one that the server does not have is left out."""
        info = pages.get(INFO, {})
        if isinstance(info.get("vllm_config"), Mapping):
            return _read_vllm(info, pages)
        if "speculative_algorithm" in info or "disaggregation_mode" in info:
            return _read_sglang(info, pages)
        if version := _text(pages.get(VERSION, {}), "version"):
            return cls("vllm", version)
        props = pages.get(PROPS, {})
        return cls("llamacpp", _text(props, "build_info")) if "default_generation_settings" in props else cls()


def _read_vllm(info: Mapping[str, Any], pages: Mapping[str, Mapping[str, Any]]) -> ServingFacts:
    config = info["vllm_config"]
    speculative, model = _object(config, "speculative_config"), _object(config, "model_config")
    rule = speculative.get("rejection_sample_method")
    runner = _object(info, "vllm_env").get(_RUNNER)
    return ServingFacts(
        engine="vllm",
        version=_text(pages.get(VERSION, {}), "version"),
        method=_text(speculative, "method"),
        draft=_text(speculative, "model"),
        draft_tokens=_count(speculative, "num_speculative_tokens"),
        target=_text(model, "model"),
        runner=None if not isinstance(runner, bool) else ("v2" if runner else "v1"),
        weight_version=_text(pages.get(WEIGHTS, {}), "weight_version"),
        lossy=None if rule is None else rule in _LOSSY_VLLM,
    )


def _read_sglang(info: Mapping[str, Any], pages: Mapping[str, Mapping[str, Any]]) -> ServingFacts:
    thresholds = [value for name in _SGLANG_THRESHOLDS if isinstance(value := info.get(name), (int, float))]
    verified = _count(info, "speculative_num_draft_tokens")
    return ServingFacts(
        engine="sglang",
        version=_text(info, "version"),
        method=_text(info, "speculative_algorithm"),
        draft=_text(info, "speculative_draft_model_path"),
        draft_tokens=None if not verified else verified - 1,  # the token before the proposed ones is verified too
        target=_text(info, "model_path"),
        weight_version=_text(pages.get(MODEL, {}), "weight_version") or _text(info, "weight_version"),
        lossy=any(each != 1.0 for each in thresholds) if thresholds else None,
    )


def read_pages(fetch: Callable[[str], Mapping[str, Any] | None]) -> dict[str, Mapping[str, Any]]:
    """Return the pages of a server that are objects, by their path."""
    return {path: found for path in PAGES if (found := fetch(path)) is not None}


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _text(found: Mapping[str, Any], name: str) -> str | None:
    value = found.get(name)
    return str(value) if isinstance(value, (str, int)) and value != "" else None


def _count(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    return value if type(value) is int and value >= 0 else None
