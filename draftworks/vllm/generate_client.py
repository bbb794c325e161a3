"""vLLM behind HTTP as what an engine asks: prompts and answers are token ids, each with a request id of ours."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftworks.errors import AbortedRequestError, EngineError
from draftworks.servers.client import GenerateRequest, Generation
from draftworks.vllm.client import VLLMClient

_MOST_AT_ONCE = 64
"""Requests of one call that are sent at the same time; the server has the others when one has been answered."""
_PLACEHOLDER = "token_id:"


class VLLMGenerateClient(VLLMClient):
    """Client of one server that generates and captures, for any number of threads. Raises as `EngineClient` does.

    Args:
        model: what the server calls the target; None asks it.
    """

    def __init__(self, url: str, timeout_s: float, key: str | None = None, model: str | None = None) -> None:
        super().__init__(url, timeout_s, key)
        self._model = model

    @property
    def model(self) -> str:
        if self._model is None:
            models = self.list_models()
            if not models:
                raise EngineError(f"{self._where}: /v1/models: expected a model, found none")
            self._model = models[0].name
        return self._model

    def tokenize_text(self, text: str) -> list[int]:
        """Return the token ids of a text by the server's tokenizer, without special tokens."""
        return self.tokenize(self.model, text)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return one answer for each request, in their order; the server processes them together.

        All of them have ended when an error is raised: nothing of theirs is handed over any more.
        """
        model = self.model
        with ThreadPoolExecutor(max(1, min(len(requests), _MOST_AT_ONCE))) as pool:
            return list(pool.map(lambda request: self._generate(model, request), requests))

    def _generate(self, model: str, request: GenerateRequest) -> Generation:
        sampling = {name: value for name, value in request.sampling.items() if name != "detokenize"}
        body = {
            "model": model,
            "prompt": list(request.input_ids),
            "request_id": request.request_id,
            "min_p": 0.0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            **sampling,
        }
        return parse_generation(self._call_for_object("POST", "/v1/completions", body))


def parse_generation(answer: dict[str, Any]) -> Generation:
    """Return vLLM's answer of /v1/completions as a `Generation`.

    Raises:
        AbortedRequestError: vLLM gave the request up.
        EngineError: the answer has another form.
    """
    try:
        [choice] = answer["choices"]
        finish = str(choice["finish_reason"])
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        logits = _read_logits(choice.get("logprobs"))
        found = Generation(tuple(map(int, choice["token_ids"])), finish, details.get("cached_tokens") or 0, logits)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"vLLM's answer to /v1/completions has an unexpected form ({type(error).__name__}: {error}): {str(answer)[:300]}"
        ) from error
    if finish not in ("stop", "length"):
        raise AbortedRequestError(f"vLLM gave a request up: it ended with {finish}")
    return found


def _read_logits(logprobs: Any) -> list[float] | None:
    """Return the values of the first token of an answer, in the order of the vocabulary; None if there are none."""
    if not logprobs or not logprobs["top_logprobs"] or not logprobs["top_logprobs"][0]:
        return None
    values = {int(name.removeprefix(_PLACEHOLDER)): float(value) for name, value in logprobs["top_logprobs"][0].items()}
    return [values[token] for token in range(len(values))]
