"""The `hf` backend: a Hugging Face transformers model whose residual streams are captured by hooks.

`hidden_states[k]` of transformers is the input of decoder layer k (k = 0: the embeddings, scaled as the model does it).
A tap is therefore a pre-hook on layer k, and no states of the other layers are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftworks.capture.engine import (
    Advance,
    AskedPrompt,
    EnginePlace,
    Generated,
    TargetEngine,
    check_sequences,
    find_backend,
    make_engine_identity,
)
from draftworks.capture.engines.generate import answer_stream, generate
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError
from draftworks.storage.identity import EngineIdentity, LayerTap
from draftworks.targets.weights import read_model_config, require_loaded


class HFTargetEngine(TargetEngine):
    """A transformers causal language model as a target.

    Args:
        model: in eval mode, on the device on which it runs.
        identity: see `make_engine_identity`.
        context: largest number of tokens of a sequence.
    """

    backend = "hf"

    def __init__(self, model: PreTrainedModel, identity: EngineIdentity, context: int) -> None:
        self.model = model
        self.identity = identity
        self.last_hidden = find_backend(self.backend).last_hidden
        self._context = context
        self._layers = find_decoder_layers(model)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @torch.inference_mode()
    def capture(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        padded = self._pad(sequences)
        with self._tap(taps) as streams:
            streams["last"] = self.model.base_model(**padded, use_cache=False).last_hidden_state  # (B, S, H)
        return split_on_host(streams, [len(ids) for ids in sequences])

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        logits = self.model(**self._pad(sequences), use_cache=False).logits  # (B, S, V)
        return [logits[index, : len(ids)].cpu() for index, ids in enumerate(sequences)]  # (length, V) each

    @torch.inference_mode()
    def head_logits(self, last: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        assert head is not None  # a causal language model has one
        return head(last.to(self.model.device, self.model.dtype)).cpu()  # (R, H) to (R, V)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: ResponseSpec,
        sample_ids: Sequence[str],
        max_total: int,
        turn: int = 0,
        end_ids: Collection[int] = (),
    ) -> list[Generated]:
        return generate(self.model, prompts, sampling, sample_ids, min(max_total, self._context), turn, end_ids)

    def answer_stream(
        self,
        waiting: deque[AskedPrompt],
        sampling: ResponseSpec,
        max_total: int,
        end_ids: Collection[int] = (),
    ) -> Iterator[Advance]:
        return answer_stream(self.model, waiting, sampling, min(max_total, self._context), end_ids)

    def _pad(self, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return sequences padded on the right, with an attention mask, both (B, S) int64.

        In a causal model, padding after a sequence does not change its hidden states.
        """
        embeddings = cast(nn.Embedding, self.model.get_input_embeddings())
        check_sequences(sequences, self._context, embeddings.num_embeddings)
        lengths = [len(ids) for ids in sequences]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)  # (B, S)
        mask = torch.zeros_like(ids)
        for index, sequence in enumerate(sequences):
            ids[index, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
            mask[index, : len(sequence)] = 1
        return {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}

    @contextmanager
    def _tap(self, taps: Sequence[LayerTap]) -> Iterator[dict[str, Tensor]]:
        outside = [tap.hf_index for tap in taps if tap.hf_index >= self.num_layers]
        if outside:
            raise CaptureError(f"layer taps {outside} are outside the target: it has taps 0..{self.num_layers - 1}")
        streams: dict[str, Tensor] = {}
        hooks = [
            self._layers[tap.hf_index].register_forward_pre_hook(_keep_input(streams, tap.name), with_kwargs=True)
            for tap in taps
        ]
        try:
            yield streams
        finally:
            for hook in hooks:
                hook.remove()


def load_hf_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None = None
) -> HFTargetEngine:
    """Load a target from its directory, or from the hub at its pinned commit; `place` is not used.

    Raises:
        ConfigError: the model is missing, unreadable or not a causal language model, or needs its own (remote) code.
        StoreError: weights are missing, unexpected or of another shape; transformers would initialize them at random.
    """
    where = f"target {target.name}: model {target.model}"
    if target.revision is None and not (Path(target.model) / "config.json").is_file():
        raise ConfigError(
            f"{where} is missing: expected a directory with config.json, or a hub id with a pinned `revision`"
        )
    config = read_model_config(target)
    if isinstance(config, str):
        raise ConfigError(f"target {target.name}: {config}")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            target.model,
            revision=target.revision or "main",
            dtype=getattr(torch, capture.compute_dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `require_loaded` reports them together with the other problems
        )
        model, loading = loaded
    except ValueError as error:
        raise ConfigError(f"{where} is not a causal language model that transformers knows: {error}") from error
    except Exception as error:  # transformers, safetensors and the hub client each raise their own types
        raise ConfigError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    require_loaded(target, model, loading)
    model = model.eval().requires_grad_(False).to(device)
    return HFTargetEngine(model, make_engine_identity(capture), target.context)


def split_on_host(streams: Mapping[str, Tensor], lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return the streams (B, S, H) of each sequence in the host's memory, (length, H) each.

    From a GPU they come in pinned memory, stream by stream, with one wait for all: piece by piece into pageable memory took
    twice the time of the forward pass (docs/gpu.md). The pieces of a stream share its memory, padding included.
    """
    if not all(stream.is_cuda for stream in streams.values()):
        return [
            {name: stream[index, :length].to("cpu", copy=True) for name, stream in streams.items()}
            for index, length in enumerate(lengths)
        ]
    hosts = {
        name: torch.empty(stream.shape, dtype=stream.dtype, pin_memory=True).copy_(stream, non_blocking=True)
        for name, stream in streams.items()
    }
    for device in {stream.device for stream in streams.values()}:
        torch.cuda.current_stream(device).synchronize()
    return [{name: host[index, :length] for name, host in hosts.items()} for index, length in enumerate(lengths)]


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers: the ModuleList of the configured length that is nearest to the base model.

    Raises:
        ConfigError: there is none, or several at the same depth.
    """
    count = model.config.get_text_config().num_hidden_layers
    candidates = [
        (name.count("."), name, module)
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    nearest = [entry for entry in candidates if entry[0] == min(depth for depth, _, _ in candidates)]
    if len(nearest) != 1:
        names = [name for _, name, _ in nearest]
        raise ConfigError(
            f"{type(model).__name__}: expected one list of {count} decoder layers, found {names or 'none'}"
        )
    return nearest[0][2]


def _keep_input(streams: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams[name] = args[0] if args else kwargs["hidden_states"]

    return hook
