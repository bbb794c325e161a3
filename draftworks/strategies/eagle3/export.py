"""Export formats of EAGLE-3: what they have in common, and that of SGLang.

Two keys mean different things in different systems, so each format maps them itself:

* Ours: `norm_output` says whether the head reads the normed state, `feedback` which state the next step is fed.
* speculators, vLLM, and SGLang from #24663 on: the head always reads the normed state; `norm_output` says that the next
  step is fed the normed one, and is false where it is missing.
* SpecForge up to 0.2.0 has the key in our sense, true where it is missing; from its #879 on in that of the servers.

So a file without the key is the same draft to all of them: the head reads the normed state, and the next step is not fed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.config_keys import (
    build_layer_keys,
    is_speculators,
    list_layer_tensors,
    locate_model,
    read_layer_sizes,
    require,
)
from draftworks.export.conventions import (
    LAYER_IDS_MEAN,
    NORM_OUTPUT_MEANS,
    PROVENANCE,
    from_format,
    name_releases,
    to_format,
)
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes
from draftworks.sglang.layers import from_eagle3_ids, read_architecture, to_eagle3_ids
from draftworks.storage.identity import LayerTap

CANONICAL_LAYER = "midlayer."
NUMBERED_LAYER = "layers.0."
_OLD_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_SAME_NAMES = (
    *("hidden_size", "head_dim", "num_heads", "num_kv_heads", "intermediate_size"),
    *("vocab_size", "draft_vocab_size", "rms_norm_eps"),
)
"""Fields of a `DraftShape` that our own config has under the same names."""


class Eagle3Format(ExportFormat):
    """Base of the formats of EAGLE-3 and P-EAGLE.

    Attributes:
        layer_prefix: prefix of the first layer's exported tensors.
    """

    strategy = "eagle3"
    layer_prefix: str

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        config, options = draft.config, read_computed_options(draft)
        return DraftShape(
            strategy=self.strategy,
            taps=draft.taps,
            num_layers=1,
            rope=dict(config["rope_parameters"]),
            options=options,
            **{name: config[name] for name in _SAME_NAMES},
        )

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return {self._to_exported_name(name): tensor for name, tensor in draft.weights.items()}

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        hidden, layer = shape.hidden_size, self.layer_prefix
        names: Shapes = {
            "fc.weight": (hidden, len(shape.taps) * hidden),
            f"{layer}hidden_norm.weight": (hidden,),
            **list_layer_tensors(layer, shape, inputs=2 * hidden),
            "norm.weight": (hidden,),
            "lm_head.weight": (shape.draft_vocab_size or shape.vocab_size, hidden),
        }
        if shape.options.get("norm_before_fc"):
            names["input_norm.weight"] = (len(shape.taps) * hidden,)
        if shape.options["fc_norm"]:
            names |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(shape.taps))}
        return names

    def to_canonical_name(self, name: str) -> str:
        name = name.removeprefix("model.")
        for old, new in _OLD_NAMES.items():
            name = name.replace(old, new)
        return name.replace(NUMBERED_LAYER, CANONICAL_LAYER, 1) if name.startswith(NUMBERED_LAYER) else name

    def _to_exported_name(self, name: str) -> str:
        return name.replace(CANONICAL_LAYER, self.layer_prefix, 1) if name.startswith(CANONICAL_LAYER) else name


PLAIN = {
    **{"fc_norm": False, "norm_before_fc": False, "norm_before_residual": False},
    **{"norm_output": True, "feedback": "pre_norm", "sliding_window": None},
}
"""EAGLE-3 as published: defaults of the options that decide what a draft computes."""


def read_computed_options(draft: CanonicalDraft) -> dict[str, Any]:
    options = draft.config["options"]
    return {name: options.get(name, plain) for name, plain in PLAIN.items()}


def count_draft_tokens(draft: CanonicalDraft) -> int:
    return draft.config["options"]["ttt_length"]


def choose_default_taps(target: TargetFiles) -> tuple[LayerTap, ...]:
    """Return the taps that all systems take where a config names no layers."""
    layers = target.num_layers
    return tuple(LayerTap(k) for k in (2, layers // 2, layers - 3))


def list_vocabulary_tensors(shape: DraftShape) -> Shapes:
    return {"d2t": (shape.draft_vocab_size or shape.vocab_size,), "t2d": (shape.vocab_size,)}


def require_one_layer(shape: DraftShape, where: str) -> DraftShape:
    if shape.num_layers != 1:
        raise ConfigError(f"{where}: num_hidden_layers {shape.num_layers}: EAGLE-3 drafts here have one layer")
    return shape


_PARALLEL = ("parallel_drafting", "ptd_token_id", "pard_token")
"""Keys of vLLM's P-EAGLE drafts, whose class name is EAGLE-3's."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NEWER_SGLANG = "SGLang with pull request #24663 (May 2026) or later"

_OF_VLLM = (
    f"vLLM ({name_releases()}) reads the layers from the top level of config.json, where `{_LAYER_IDS}` counts indices of "
    "hidden_states, one more than the layers that SGLang reads from `eagle_config`: keep both."
)

_MEANINGS = {
    ("specforge", "true"): "the head reads the normed state, and the next step is fed the un-normed one",
    ("specforge", "false"): "the head reads the un-normed state",
    ("sglang", "true"): "the head reads the normed state, and the next step is fed it too",
    ("sglang", "false"): "the head reads the normed state, and the next step is fed the un-normed one",
}


class SglangEagle3(Eagle3Format):
    """The format of SGLang's `LlamaForCausalLMEagle3`; SpecForge's and ModelOpt's checkpoints are variants of it."""

    name = "sglang_eagle3"
    layer_prefix = CANONICAL_LAYER

    def describe_loaders(self, draft: CanonicalDraft) -> str:
        needed = []
        if read_computed_options(draft)["fc_norm"]:
            needed.append("fc_norm")
        if len(draft.taps) != 3:
            needed.append(f"{len(draft.taps)} taps")
        if not needed:
            return f"Any SGLang with EAGLE-3: one layer under the name `midlayer`, three taps. {_OF_VLLM}"
        return (
            f"{_NEWER_SGLANG}: older ones do not know {' and '.join(needed)}, and would load this draft without an error. "
            f"{_OF_VLLM}"
        )

    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        tokens = count_draft_tokens(draft)
        return {
            "SGLang": f"python -m sglang.launch_server --model-path {locate_model(draft.target)} "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {folder} "
            f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        }

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """See the base. `target_hidden_size` is left out: SGLang tests only whether the key is there.

        Layers are named twice under one key. SGLang reads `eagle_config` alone, where an id is a layer, whose output it takes.
        vLLM 0.32 and 0.33 look at the top level first, where an id is an index of hidden_states; of `eagle_config` they
        would take the ids as such indices too (V1), or not at all (V2), and so other layers without a word.

        `norm_output` is left out because it has two meanings, which are the same without it (see the module).
        """
        to_format(self.name, draft.taps)  # refuses those that no server counts
        ids = to_eagle3_ids(draft.taps, read_architecture(draft.target))
        newer = {"fc_norm": True, "num_aux_hidden_states": len(ids)}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **build_layer_keys(draft, dtype),
            "draft_vocab_size": draft.config["draft_vocab_size"],
            "eagle_config": {_LAYER_IDS: ids, "use_aux_hidden_state": True},
            _LAYER_IDS: [tap.to_vllm() for tap in draft.taps],
            **(newer if read_computed_options(draft)["fc_norm"] else {}),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return "LlamaForCausalLMEagle3" in (config.get("architectures") or []) and not is_speculators(config)

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        where = "config.json"
        parallel = [key for key in _PARALLEL if config.get(key) is not None]
        if parallel:
            raise ConfigError(
                f"{where}: {', '.join(parallel)}: a P-EAGLE draft, which can be imported from the speculators format only"
            )
        unknown = [key for key in ("norm_before_residual", "norm_before_fc") if config.get(key)]
        if unknown:
            raise ConfigError(f"{where}: {', '.join(unknown)}: true: neither SGLang nor SpecForge has such a draft")
        if config.get("target_hidden_size") not in (None, config.get("hidden_size")):
            raise ConfigError(
                f"{where}: target_hidden_size {config['target_hidden_size']}: drafts here are as wide as it"
            )
        norms = {"fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")), **_read_norm_output(config)}
        return require_one_layer(
            DraftShape(
                strategy=self.strategy,
                taps=_read_taps(config, target),
                draft_vocab_size=config.get("draft_vocab_size") or require(config, "vocab_size", where),
                options=PLAIN | norms,
                **read_layer_sizes(config, where),
            ),
            where,
        )

    def list_remarks(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        return [*_list_layer_remarks(config), *self._list_norm_remarks(config, tensors)]

    def _list_norm_remarks(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        if config.get("norm_output") is None:
            return []
        value = str(bool(config["norm_output"])).lower()
        if _read_norm_output_means(config) == "sglang":
            return [f"norm_output: {value} was read as SGLang means it: {_MEANINGS['sglang', value]}"]
        said = f"norm_output: {value} was read as SpecForge 0.2.0 means it: {_MEANINGS['specforge', value]}"
        norm = tensors.get("norm.weight", tensors.get("model.norm.weight"))
        if value == "false" and norm is not None and bool((norm != 1).any()):
            said += ", although norm.weight is not 1 as it is where nothing has trained it"
        return [
            f"{said}. To SGLang and to SpecForge from its #879 on, {_MEANINGS['sglang', value]}: if such a trainer wrote "
            "this draft, import it with --norm-output-means sglang"
        ]

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        """See the base. `d2t` and `t2d` are there with a full vocabulary too, as the identity."""
        return super().list_expected_tensors(shape) | list_vocabulary_tensors(shape)


def _list_layer_remarks(config: Mapping[str, Any]) -> list[str]:
    """Return how layer ids of others were read, and what the other server would make of them."""
    ids, of_vllm = (config.get("eagle_config") or {}).get(_LAYER_IDS), config.get(_LAYER_IDS)
    if not (ids or of_vllm) or _is_ours(config) or (ids and of_vllm not in (None, ids)):
        return []
    if config.get(LAYER_IDS_MEAN) == "vllm" or not ids:
        return [
            f"{_LAYER_IDS} {ids or of_vllm} was read as vLLM means it, as indices of hidden_states: SGLang reads none at the top "
            "level, and takes those of eagle_config for layers, one more. Serve it the export of the imported draft"
        ]
    return [
        f"eagle_config.{_LAYER_IDS} {ids} was read as SGLang means it, as layers. vLLM takes such ids for indices of "
        "hidden_states and feeds this file other layers without a word: serve it the export of the imported draft"
    ]


def _is_ours(config: Mapping[str, Any]) -> bool:
    return "draftworks" in (config.get(PROVENANCE) or {})


def _read_norm_output(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the key stands for: by SpecForge 0.2.0, whose layout this is, unless SGLang is named."""
    value = config.get("norm_output")
    if _read_norm_output_means(config) == "sglang":
        return {"feedback": "post_norm" if value else "pre_norm"}
    return {"norm_output": value is None or bool(value)}


def _read_norm_output_means(config: Mapping[str, Any]) -> str:
    """Return whose meaning of `norm_output` applies: SGLang's in our own exports, some of which once had the key."""
    means = config.get(NORM_OUTPUT_MEANS, "sglang" if _is_ours(config) else "specforge")
    if means not in ("specforge", "sglang"):
        raise ConfigError(f"config.json: {NORM_OUTPUT_MEANS}: expected specforge or sglang, found {means!r}")
    return means


def _read_taps(config: Mapping[str, Any], target: TargetFiles) -> tuple[LayerTap, ...]:
    """Return the taps that the ids of a config.json name, or the default ones.

    Of the two places SGLang reads `eagle_config` alone, and vLLM both, the top level first. So ids at the top level alone are
    vLLM's, and other ids there than in `eagle_config` say that the latter are SGLang's. SGLang's default list names the
    default taps in SGLang's meaning only.

    Raises:
        ConfigError: ids that either could mean, and no word on whose they are; no list of ascending ids.
    """
    ids, of_vllm = (config.get("eagle_config") or {}).get(_LAYER_IDS), config.get(_LAYER_IDS)
    found: list[int] = ids or of_vllm or []
    if not found:
        return choose_default_taps(target)
    means = config.get(LAYER_IDS_MEAN)
    from_format(SglangEagle3.name, found)  # refuses what is no list of ascending ids
    if means is None and not ids:
        means = "vllm"
    if means is None and _are_of_sglang(config, found, of_vllm, target):
        means = "sglang"
    if means not in ("sglang", "vllm"):
        raise ConfigError(
            f"config.json: {LAYER_IDS_MEAN}: expected sglang or vllm, found {means or 'nothing'}. eagle_config.{_LAYER_IDS} {found} are layers "
            "to SGLang and SpecForge, and indices of hidden_states, one more than the layer, to vLLM; the file does not say with "
            "which of them the draft was trained: import it with --layer-ids-mean sglang or --layer-ids-mean vllm"
        )
    if means == "vllm":
        return from_format("speculators_eagle3", found)
    return from_eagle3_ids(found, read_architecture(target))


def _are_of_sglang(config: Mapping[str, Any], ids: list[int], of_vllm: list[int] | None, target: TargetFiles) -> bool:
    """Return whether ids in `eagle_config` can be SGLang's only."""
    both = of_vllm not in (None, ids)
    return both or _is_ours(config) or ids == to_eagle3_ids(choose_default_taps(target), read_architecture(target))
