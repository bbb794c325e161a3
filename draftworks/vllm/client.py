"""Client of the part of vLLM's HTTP interface that Draftworks uses; prompts and answers are token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftworks.errors import CaptureError, EngineError
from draftworks.servers.client import Counters, EngineClient, Sampling, SpeculatedAnswer
from draftworks.servers.counters import PASSES, TOKENS, VLLM_COUNTERS, parse_metrics
from draftworks.vllm.environment import VLLM


@dataclass(frozen=True)
class ServedModel:
    """A model of a running server.

    Attributes:
        name: what requests call it.
        root: path or hub id that it was loaded from.
        context: tokens of a prompt and its answer; None if the server does not say.
    """

    name: str
    root: str
    context: int | None


@dataclass(frozen=True)
class Completion:
    """vLLM's answer to a prompt.

    Attributes:
        prompt_ids: the prompt as the server read it.
        finish: `stop` (an end token, which is part of `output_ids`) or `length`.
        speculation: the counters of this request, as vLLM names them; None if the server sends none.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish: str
    speculation: Mapping[str, Any] | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Completion:
        """Parse an answer of /v1/completions that was asked for with `return_token_ids`.

        Raises:
            EngineError: it has another form.
        """
        try:
            [choice] = answer["choices"]
            speculation = (answer.get("metrics") or {}).get("speculative_decoding")
            ids = tuple(map(int, choice["token_ids"]))
            return cls(tuple(choice["prompt_token_ids"] or ()), ids, str(choice["finish_reason"]), speculation)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"vLLM's answer to /v1/completions has an unexpected form ({type(error).__name__}: {error}): "
                f"{str(answer)[:300]}"
            ) from error


class VLLMClient(EngineClient):
    """Client of one server, for any number of threads. Raises as `EngineClient` does."""

    SOFTWARE = VLLM

    def get_version(self) -> str:
        return str(self._call_for_object("GET", "/version").get("version"))

    def list_models(self) -> list[ServedModel]:
        """Return the models that the server names: the target first, then adapters."""
        found = self._call_for_object("GET", "/v1/models").get("data")
        if not isinstance(found, list) or not all(isinstance(each, dict) and "id" in each for each in found):
            raise EngineError(f"{self._where}: /v1/models: expected a list of models, found {str(found)[:200]}")
        return [ServedModel(str(each["id"]), str(each.get("root")), each.get("max_model_len")) for each in found]

    def get_config(self) -> dict[str, Any] | None:
        """Return the server's configuration; None unless it runs in development mode (VLLM_SERVER_DEV_MODE=1)."""
        try:
            info = self._call_for_object("GET", "/server_info?config_format=json")
        except CaptureError:
            return None
        config = info.get("vllm_config")
        return config if isinstance(config, dict) else None

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of a text by the server's tokenizer, without special tokens."""
        return self._tokenize({"model": model, "prompt": text, "add_special_tokens": False})

    def complete(
        self, model: str, prompt: Sequence[int], sampling: Sampling, more: Mapping[str, Any] | None = None
    ) -> Completion:
        """Return the answer to a prompt.

        Args:
            model: name of the model, as of `list_models`.
            more: further fields of the request, such as `kv_transfer_params`.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,  # what a request leaves open is the model's generation_config.json's
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **({} if sampling.seed is None else {"seed": sampling.seed}),
            **(more or {}),
        }
        return Completion.of(self._call_for_object("POST", "/v1/completions", body))

    def answer(self, model: str, prompt: Sequence[int], sampling: Sampling) -> SpeculatedAnswer:
        """Return the answer to a prompt with its counters."""
        return read_speculation(self.complete(model, prompt, sampling))

    def get_counters(self) -> Counters:
        """Return the server's counters since its start, from /metrics.

        Raises:
            EngineError: a counter is missing, as on a server with --disable-log-stats, or one that does not speculate.
        """
        metrics = parse_metrics(self._get_metrics(), VLLM_COUNTERS.wanted)
        passes, tokens = VLLM_COUNTERS.counters[PASSES], VLLM_COUNTERS.others[TOKENS]
        if passes not in metrics:
            raise EngineError(
                f"{self._where}: expected {passes} in /metrics, found none of its counters: expected a server with "
                "--speculative-config and without --disable-log-stats"
            )
        return Counters(metrics.read_counter(passes), metrics.read_counter(tokens))


def read_speculation(answer: Completion) -> SpeculatedAnswer:
    """Return an answer with the counters of its request.

    Raises:
        EngineError: the counters contradict each other, or there are none.
    """
    found = answer.speculation
    if found is None:
        if len(answer.output_ids) > 1:
            raise EngineError(
                "vLLM answered without counters of speculative decoding: expected a server with --speculative-config and "
                "--per-request-spec-decode-metrics detailed (vLLM 0.32 or later)"
            )
        return SpeculatedAnswer(answer.output_ids, 0, ())  # the answer ended with the prefill: nothing was verified
    try:
        histogram = tuple(map(int, found["acceptance_histogram"]))
        passes, steps = int(found["num_spec_steps"]), list(found.get("per_step_accepted") or ())
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM's counters of a request have an unexpected form: {str(found)[:300]}") from error
    if sum(histogram) != passes or (steps and len(steps) != passes):
        raise EngineError(
            f"vLLM's counters disagree: num_spec_steps is {passes}, the histogram {histogram} has {sum(histogram)} passes, "
            f"and there are {len(steps)} steps"
        )
    return SpeculatedAnswer(answer.output_ids, passes, histogram, steps[-1] if steps else None)
