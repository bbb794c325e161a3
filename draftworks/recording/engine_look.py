"""What an engine says of itself: which one it is, its draft, the version of its weights, its rule of acceptance.

Pages and fields are those of vLLM 0.32 (`/version`; `/server_info` in development mode), SGLang 0.5.23 (`/server_info`,
`/model_info`) and llama.cpp b11434 (`/props`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from draftworks.production.requests import Engine
from draftworks.storage.files import parse_json

LOOK_TIMEOUT_S = 10.0
MAX_PAGE_BYTES = 4 << 20
_LOSSY_VLLM = ("synthetic", "fly")
"""Values of vLLM's rejection_sample_method that change what is answered."""
_SGLANG_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


@dataclass(frozen=True)
class EngineFacts:
    """What a look at a server showed.

    Attributes:
        engine: None if no page says it.
        draft: path or name of the draft model, as the server was given it.
        lossy: whether its rule of acceptance changes what is answered; None if it does not say.
    """

    engine: Engine | None = None
    version: str | None = None
    draft: str | None = None
    weight_version: str | None = None
    lossy: bool | None = None


class EngineLook:
    """Looks at the pages of one server.

    Args:
        headers: of the looks alone, such as one with a key; never of what clients send.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._session, self._url, self._headers = session, url, headers

    async def look(self) -> EngineFacts:
        """Return what the server says now; nothing is known where it does not answer."""
        info = await self._get("/server_info?config_format=json")
        if isinstance(info.get("vllm_config"), Mapping):
            return _read_vllm_config(info["vllm_config"], await self._get("/version"))
        if "speculative_algorithm" in info or "disaggregation_mode" in info:
            return _read_sglang(info, await self._get("/model_info"))
        version = await self._get("/version")
        if version.get("version"):
            return EngineFacts("vllm", _text(version, "version"))
        props = await self._get("/props")
        if "default_generation_settings" in props:
            return EngineFacts("llamacpp", _text(props, "build_info"))
        return EngineFacts()

    async def _get(self, path: str) -> Mapping[str, Any]:
        """Return the object of a page; empty if there is none."""
        limit = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, headers=self._headers, timeout=limit) as answer:
                if answer.status != 200:
                    return {}
                content = await answer.content.read(MAX_PAGE_BYTES)
                while len(content) < MAX_PAGE_BYTES and (more := await answer.content.read(MAX_PAGE_BYTES)):
                    content += more
                found = parse_json(content)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _read_vllm_config(config: Mapping[str, Any], version: Mapping[str, Any]) -> EngineFacts:
    found = config.get("speculative_config")
    speculative = found if isinstance(found, Mapping) else {}
    method = speculative.get("rejection_sample_method")
    return EngineFacts(
        "vllm",
        _text(version, "version"),
        _text(speculative, "model"),
        lossy=None if method is None else method in _LOSSY_VLLM,
    )


def _read_sglang(info: Mapping[str, Any], model: Mapping[str, Any]) -> EngineFacts:
    thresholds = [info.get(name) for name in _SGLANG_THRESHOLDS]
    known = [each for each in thresholds if isinstance(each, (int, float))]
    return EngineFacts(
        "sglang",
        _text(info, "version"),
        _text(info, "speculative_draft_model_path"),
        _text(model, "weight_version") or _text(info, "weight_version"),
        any(each != 1.0 for each in known) if known else None,
    )


def _text(found: Mapping[str, Any], name: str) -> str | None:
    value = found.get(name)
    return str(value) if isinstance(value, (str, int)) and value != "" else None
