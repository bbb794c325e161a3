"""Client of the part of SGLang's HTTP interface that Draftworks uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftworks.errors import AbortedRequestError, CaptureError, EngineError
from draftworks.servers.client import EngineClient, GenerateRequest, Generation
from draftworks.sglang.environment import SGLANG
from draftworks.sglang.hook import find_spool, uses_mooncake


@dataclass(frozen=True)
class ServerInfo:
    """Configuration of a running server, as the server reports it.

    Attributes:
        model: the model that it serves now.
        layer_ids: layers whose outputs are captured; None if it captures none.
        spool: the folder that the capture hook writes to; None if the server has not loaded the hook, or `mooncake`.
        mooncake: whether its hook hands over through Mooncake.
        numerics: arguments that change its numerical results and are not at their default, by name.
        started_with: the model that it was started with, before any update of its weights.
        convention: how `layer_ids` are counted: `eagle3`, `dflash` or `dspark`; None if the server does not report it.
        attention_dp: number of groups of ranks that have separate requests; the capture hook writes on the first rank
            only.
    """

    version: str
    model: str
    revision: str | None
    dtype: str
    context: int | None
    radix_cache: bool
    chunked_prefill: bool
    layer_ids: tuple[int, ...] | None
    spool: Path | None
    numerics: dict[str, str] = field(default_factory=dict)
    started_with: str = ""
    convention: str | None = None
    attention_dp: int = 1
    mooncake: bool = False


class SGLangClient(EngineClient):
    """Client of one server, for any number of threads. Raises as `EngineClient` does."""

    SOFTWARE = SGLANG

    def get_info(self) -> ServerInfo:
        info = self._call_for_object("GET", "/server_info")
        captures = bool(info.get("enable_return_aux_hidden_states"))
        layers = info.get("return_aux_hidden_state_layer_ids")
        return ServerInfo(
            version=str(info.get("version")),
            model=str(self._get_model_info().get("model_path") or info.get("model_path")),
            started_with=str(info.get("model_path")),
            convention=info.get("aux_hidden_state_capture"),
            attention_dp=_count_attention_groups(info),
            revision=info.get("revision"),
            dtype=str(info.get("dtype")),
            context=info.get("context_length"),
            radix_cache=not info.get("disable_radix_cache"),
            chunked_prefill=info.get("chunked_prefill_size") != -1,
            layer_ids=tuple(layers) if captures and layers else None,
            spool=find_spool(info.get("forward_hooks") or []),
            mooncake=uses_mooncake(info.get("forward_hooks") or []),
            numerics=_list_changed_numerics(info),
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text by the server's tokenizer, without special tokens."""
        return self._tokenize({"prompt": text, "add_special_tokens": False})

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return one answer for each request, in their order; the server processes them together."""
        answers = self._call(
            "POST",
            "/generate",
            {
                "rid": [request.request_id for request in requests],
                "input_ids": [list(request.input_ids) for request in requests],
                "sampling_params": [request.sampling for request in requests],
            },
        )
        if not isinstance(answers, list) or len(answers) != len(requests):
            found = f"{len(answers)}" if isinstance(answers, list) else str(answers)[:200]
            raise EngineError(f"{self._where}: /generate: expected a list of {len(requests)} answers, found {found}")
        return [parse_generation(answer) for answer in answers]

    def _get_model_info(self) -> dict[str, Any]:
        """Return the server's answer to /model_info; empty if the server does not know that path.

        It names the weights that are served now, which may have been replaced since the start.
        """
        try:
            return self._call_for_object("GET", "/model_info")
        except CaptureError:
            return {}


def parse_generation(answer: Any) -> Generation:
    """Return SGLang's answer of /generate as a `Generation`.

    Raises:
        AbortedRequestError: SGLang aborted the request.
        EngineError: the answer has another form.
    """
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] != "abort":
            return Generation(tuple(answer["output_ids"]), finish["type"], meta["cached_tokens"])
        reason = finish.get("message") or "it gave no reason"
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"SGLang's answer to /generate has an unexpected form ({type(error).__name__}: {error}): "
            f"{str(answer)[:300]}"
        ) from error
    raise AbortedRequestError(f"SGLang aborted a request: {reason}")


def _count_attention_groups(info: dict[str, Any]) -> int:
    groups = max(info.get("attn_dp_size") or 1, 1)
    return groups if groups > 1 or not info.get("enable_dp_attention") else max(info.get("dp_size") or 1, 2)


def _list_changed_numerics(info: dict[str, Any]) -> dict[str, str]:
    """Return the arguments that are not at their default, among those that are easily set and forgotten."""
    defaults: dict[str, tuple[Any, ...]] = {
        "quantization": (None,),
        "kv_cache_dtype": ("auto",),
        "torchao_config": ("", None),
        "lora_paths": (None, [], {}),
        "json_model_override_args": ("{}", "", None),
    }
    return {
        f"--{name.replace('_', '-')}": str(info[name])
        for name, values in defaults.items()
        if info.get(name, values[0]) not in values
    }
