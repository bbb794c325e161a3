"""A target's forward pass on the CPU with one layer in memory at a time; weights come from the safetensors files.

transformers' modules are built on the meta device from the unchanged config.json, so that everything that a model
family derives from a layer's index stays right. Each decoder layer's weights are loaded with transformers' own
conversion of the checkpoint's names just before the layer runs, and unloaded after it. This gives the checkpoint's own
results without an engine and without the memory for the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from draftworks.capture.engines.hf import find_decoder_layers
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import WeightFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.identity import LayerTap


@dataclass(frozen=True)
class Streams:
    """Residual streams of some token sequences.

    Attributes:
        exact: by stream name ("hf0", "hf1", ..., and "last" where all layers ran), one (S, H) for each sequence.
        rounded: the same, with the output of every module rounded to the requested dtype; shows the difference that
            rounding alone causes.
    """

    exact: dict[str, list[Tensor]]
    rounded: dict[str, list[Tensor]]


class StreamedTarget:
    """A target whose layers are read from its files when the forward pass reaches them.

    Args:
        dtype: dtype of the computation.

    Raises:
        ConfigError: the target is not a causal language model that transformers knows.
        StoreError: a weight file is missing or damaged.
    """

    def __init__(self, target: TargetFiles, dtype: torch.dtype = torch.float32) -> None:
        self._where = f"target {target.name}: {target.model}"
        self._dtype = dtype
        self._model = _build_empty_model(target, dtype, self._where)
        self._layers = find_decoder_layers(self._model)
        self._name_of = {module: name for name, module in self._model.named_modules()}
        self._files = WeightFiles(target)
        self._sources = _find_sources(self._model, self._files)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def list_layer_bytes(self) -> list[int]:
        """Return the size of each decoder layer in the files, in bytes."""
        return [
            sum(self._files.nbytes(source) for name in self._list_states(layer) for source in self._sources[name])
            for layer in self._layers
        ]

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sequence[int]], layers: int, rounding: torch.dtype) -> Streams:
        """Return the streams hf0 to hf{layers} of token sequences; after the final layer it is `last` instead.

        Args:
            sequences: token ids of each sequence.
            layers: number of layers to run, from the first one on.
            rounding: dtype of `Streams.rounded`.

        Raises:
            StoreError: tensors are missing in the files, damaged, or of another shape than in config.json.
        """
        rounds = rounding != self._dtype
        # (B, S); with rounding, the second half of B is rounded
        inputs = _pad([*sequences, *sequences] if rounds else sequences)
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(_hide_progress_bars())
            stack.enter_context(self._load_embedding(inputs["input_ids"]))
            stack.enter_context(self._stream_layers(found, layers))
            if rounds:
                stack.enter_context(_round_second_half(self._layers, inputs["input_ids"].shape, rounding))
            self._fill(self._list_other_states())
            with suppress(_StoppedError):  # enough layers ran
                found["last"] = self._model.base_model(**inputs, use_cache=False).last_hidden_state  # (B, S, H)
        exact = {name: _unpad(states, sequences) for name, states in found.items()}
        rounded = (
            {name: _unpad(states[len(sequences) :], sequences) for name, states in found.items()} if rounds else exact
        )
        return Streams(exact, rounded)

    def load_final_norm(self) -> nn.Module:
        """Return the norm after the last layer with the target's weights; it maps (..., H) to (..., H).

        Raises:
            ConfigError: it cannot be told which module that is.
            StoreError: see `run`.
        """
        text_model = self._get_text_model()
        norms = [child for name, child in text_model.named_children() if "norm" in name or name == "ln_f"]
        if len(norms) != 1:
            raise ConfigError(
                f"{self._where}: expected one norm after the layers of {type(text_model).__name__}, found {len(norms)}: "
                "capture with backend hf"
            )
        with _hide_progress_bars():
            self._fill(self._list_states(norms[0]))
        return norms[0]

    @contextmanager
    def _stream_layers(self, found: dict[str, Tensor], layers: int) -> Iterator[None]:
        """Load each layer when its input arrives, store a copy of it in `found`, and unload the layer after it ran."""

        def make_hook(index: int) -> Callable[..., None]:
            def load_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found[LayerTap(index).name] = (args[0] if args else kwargs["hidden_states"]).clone()
                if index == layers:
                    raise _StoppedError
                self._fill(self._list_states(layer))

            return load_layer

        hooks = [
            layer.register_forward_pre_hook(make_hook(index), with_kwargs=True)
            for index, layer in enumerate(self._layers)
        ]
        hooks += [layer.register_forward_hook(lambda layer, args, output: _unload(layer)) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _load_embedding(self, input_ids: Tensor) -> Iterator[None]:
        """Load only those rows of the input embedding matrix that the token ids need.

        Raises:
            StoreError: the files have no input embeddings.
        """
        module = self._model.get_input_embeddings()
        (source,) = self._sources[f"{self._name_of[module]}.weight"] or (None,)
        if source is None:
            raise StoreError(f"{self._where}: expected the input embeddings in its safetensors, found none")
        used_ids = input_ids.unique()  # (U,)
        empty = module.weight
        module.weight = nn.Parameter(self._files.read_rows(source, used_ids).to(self._dtype), requires_grad=False)
        hook = module.register_forward_pre_hook(lambda module, args: (torch.searchsorted(used_ids, args[0]), *args[1:]))
        try:
            yield
        finally:
            hook.remove()
            module.weight = empty

    def _list_states(self, module: nn.Module) -> list[str]:
        return [f"{self._name_of[module]}.{name}" for name in module.state_dict()]

    def _list_other_states(self) -> list[str]:
        """Return the names of the language model's states outside its layers and embedding, such as the final norm."""
        text_model = self._get_text_model()
        within = {name for layer in self._layers for name in self._list_states(layer)}
        within.add(f"{self._name_of[self._model.get_input_embeddings()]}.weight")
        return [name for name in self._list_states(text_model) if name not in within]

    def _get_text_model(self) -> nn.Module:
        layers = next(name for module, name in self._name_of.items() if module is self._layers)
        return self._model.get_submodule(layers.rpartition(".")[0])

    def _fill(self, names: Sequence[str]) -> None:
        """Load parameters and buffers of the model by their names in it.

        Raises:
            StoreError: some of them are not in the files, or have another shape.
        """
        parts = {source: self._files.open_tensor(source) for name in names for source in self._sources[name]}
        plan = self._model._get_dtype_plan(self._dtype)
        mapping: list[Any] = [*get_model_conversion_mapping(self._model)]
        loading = LoadStateDictConfig(dtype=self._dtype, dtype_plan=plan, weight_mapping=mapping)
        info, _ = convert_and_load_state_dict_in_model(self._model, parts, loading)
        wrong = sorted(info.missing_keys & set(names)) + sorted(map(str, info.mismatched_keys))
        wrong += [f"{name}: {reason}" for name, reason in info.conversion_errors.items()]
        if wrong:
            raise StoreError(
                f"{self._where}: {len(wrong)} tensors are missing in its safetensors or do not fit config.json, the "
                f"first {wrong[0]}"
            )


def load_final_norm(target: TargetFiles, dtype: torch.dtype) -> nn.Module:
    """Return a target's norm after its last layer, which computes in `dtype`; see `StreamedTarget.load_final_norm`."""
    return StreamedTarget(target, dtype).load_final_norm()


def _build_empty_model(target: TargetFiles, dtype: torch.dtype, where: str) -> PreTrainedModel:
    """Build the model on device meta, except the buffers that no file holds, such as the frequencies of RoPE.

    Raises:
        ConfigError: the target is not a causal language model that transformers knows.
    """
    try:
        config = AutoConfig.from_pretrained(target.model, revision=target.revision or "main", trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except Exception as error:  # each configuration class may raise errors of its own
        raise ConfigError(f"{where}: not a causal language model that transformers knows: {error}") from error
    if dtype == torch.float64 and hasattr(config.get_text_config(), "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # grouped matrix products do not support float64
    for name, buffer in list(model.named_non_persistent_buffers()):
        module, _, own = name.rpartition(".")
        model.get_submodule(module)._buffers[own] = torch.empty_like(buffer, device="cpu")
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    return model.requires_grad_(False)


def _find_sources(model: PreTrainedModel, files: WeightFiles) -> dict[str, list[str]]:
    """Return, for each parameter or buffer of the model by name, the names of the file tensors that it is made of."""
    states = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    targets_of = {source: each.target_patterns for each in converters for source in each.source_patterns}
    sources: dict[str, list[str]] = defaultdict(list)
    for source in files:
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, states)
        if name not in states and source in states:
            name, pattern = rename_source_key(source, [], [], model.base_model_prefix, states)
        patterns = targets_of.get(pattern or "", ())
        for target in patterns or (name,):
            sources[name.replace(patterns[0], target) if patterns else name].append(source)
    return sources


def _unload(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def _pad(sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Pad sequences on the right, which does not change the states of a causal model's earlier positions."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(list(ids)) for ids in sequences], batch_first=True)  # (B, S)
    lengths = torch.tensor([len(ids) for ids in sequences])  # (B,)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def _unpad(states: Tensor, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split padded states (B, S, H) into one (S, H) for each sequence, without its padding."""
    return [states[index, : len(ids)].clone() for index, ids in enumerate(sequences)]


@contextmanager
def _round_second_half(layers: Iterable[nn.Module], shape: torch.Size, dtype: torch.dtype) -> Iterator[None]:
    """Round the output of every module with weights in the layers to a dtype, for the second half of a batch.

    Outputs are rounded only where their first dimension is the batch rows, or all tokens of the batch in order; inside
    experts the tokens are sorted differently.
    """

    def round_half(states: Tensor) -> Tensor:
        if states.is_floating_point() and states.dim() > 1 and len(states) in (shape[0], shape.numel()):
            half = len(states) // 2
            states = torch.cat([states[:half], states[half:].to(dtype).to(states.dtype)])
        return states

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, round_half, output)

    modules = [module for layer in layers for module in layer.modules() if next(module.parameters(), None) is not None]
    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers, which would show one for every layer."""
    were_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            transformers_logging.enable_progress_bar()


class _StoppedError(Exception):
    """Raised by a hook to end a forward pass before the layers that are not needed."""
