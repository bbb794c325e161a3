"""What the export formats of EAGLE-3 have in common.

Two words mean different things in different systems, so each format maps them itself:

* Ours: `norm_output` says whether the head reads the normed state, `feedback` which state the next step is fed.
* speculators, vLLM, and SGLang from #24663 on: the head always reads the normed state; `norm_output` says that the next
  step is fed the normed one, and is false where it is missing.
* SpecForge up to 0.2.0 has the key in our sense, true where it is missing; from its #879 on in that of the servers.

So a file without the key is the same draft to all of them: the head reads the normed state, and the next step is not fed it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape, ExportFormat, Shapes
from draftworks.export.layer_tensors import layer_tensors
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
    """What both formats have in common."""

    strategy = "eagle3"
    layer_prefix: str

    def described(self, draft: CanonicalDraft) -> DraftShape:
        config, options = draft.config, computed_options(draft)
        return DraftShape(
            strategy=self.strategy,
            taps=draft.taps,
            num_layers=1,
            rope=dict(config["rope_parameters"]),
            options=options,
            **{name: config[name] for name in _SAME_NAMES},
        )

    def tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        return {self._exported_name(name): tensor for name, tensor in draft.weights.items()}

    def expected_tensors(self, shape: DraftShape) -> Shapes:
        hidden, layer = shape.hidden_size, self.layer_prefix
        names: Shapes = {
            "fc.weight": (hidden, len(shape.taps) * hidden),
            f"{layer}hidden_norm.weight": (hidden,),
            **layer_tensors(layer, shape, inputs=2 * hidden),
            "norm.weight": (hidden,),
            "lm_head.weight": (shape.draft_vocab_size or shape.vocab_size, hidden),
        }
        if shape.options.get("norm_before_fc"):
            names["input_norm.weight"] = (len(shape.taps) * hidden,)
        if shape.options["fc_norm"]:
            names |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(shape.taps))}
        return names

    def canonical_name(self, name: str) -> str:
        name = name.removeprefix("model.")
        for old, new in _OLD_NAMES.items():
            name = name.replace(old, new)
        return name.replace(NUMBERED_LAYER, CANONICAL_LAYER, 1) if name.startswith(NUMBERED_LAYER) else name

    def _exported_name(self, name: str) -> str:
        return name.replace(CANONICAL_LAYER, self.layer_prefix, 1) if name.startswith(CANONICAL_LAYER) else name


PLAIN = {
    **{"fc_norm": False, "norm_before_fc": False, "norm_before_residual": False},
    **{"norm_output": True, "feedback": "pre_norm", "sliding_window": None},
}
"""EAGLE-3 as published, in the options that decide what a draft computes: a draft that does not name one has this value."""


def computed_options(draft: CanonicalDraft) -> dict[str, Any]:
    options = draft.config["options"]
    return {name: options.get(name, plain) for name, plain in PLAIN.items()}


def draft_tokens(draft: CanonicalDraft) -> int:
    return draft.config["options"]["ttt_length"]


def default_taps(target: TargetFiles) -> tuple[LayerTap, ...]:
    """Where a config names no layers, all of them take these."""
    layers = target.num_layers
    return tuple(LayerTap(k) for k in (2, layers // 2, layers - 3))


def vocabulary_shapes(shape: DraftShape) -> Shapes:
    return {"d2t": (shape.draft_vocab_size or shape.vocab_size,), "t2d": (shape.vocab_size,)}


def one_layer(shape: DraftShape, where: str) -> DraftShape:
    if shape.num_layers != 1:
        raise ConfigError(f"{where}: num_hidden_layers {shape.num_layers}: EAGLE-3 drafts here have one layer")
    return shape
