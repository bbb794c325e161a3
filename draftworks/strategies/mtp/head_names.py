"""Names of a target's multi-token-prediction (MTP) tensors in its files, and of the same tensors in the draft.

Qwen3-Next and Qwen3.5 keep them under `mtp.`, DeepSeek-V3 as one more decoder layer after its own. The order of the two
inputs of the projection is the same in both: the token's embedding, then the hidden state. (Read in SGLang 0.5.23,
`qwen3_next_mtp.py`, `qwen3_5_mtp.py` and `deepseek_nextn.py`, and in speculators 0.9.0, `convert/mtp/converter.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_QWEN = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.",
    "mtp.pre_fc_norm_embedding.": "token_norm.",
    "mtp.layers.0.": "layer.",
    "mtp.norm.": "norm.",
}
_DEEPSEEK = {
    "eh_proj.": "fc.",
    "hnorm.": "hidden_norm.",
    "enorm.": "token_norm.",
    "shared_head.norm.": "norm.",
    "": "layer.",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""DeepSeek's files repeat the embedding and the head of the model in the layer; servers use the model's."""
QWEN_KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DEEPSEEK_KINDS = ("deepseek_v3",)
_EXPERT = re.compile(r"^(?P<owner>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")


@dataclass(frozen=True)
class HeadNames:
    """Prefixes of names in the target's files, the more special first, and the draft's for them.

    Attributes:
        root: what all names in the files begin with.
    """

    root: str
    prefixes: Mapping[str, str]

    @classmethod
    def of(cls, model_type: str, num_layers: int) -> HeadNames | None:
        """Return the names for a model type (that of the text config); None if it is not known to have such a layer."""
        if model_type in QWEN_KINDS:
            return cls("mtp.", _QWEN)
        if model_type in DEEPSEEK_KINDS:
            root = f"model.layers.{num_layers}."
            return cls(root, {f"{root}{theirs}": ours for theirs, ours in _DEEPSEEK.items()})
        return None

    def select(self, names: Iterable[str]) -> list[str]:
        """Return those of a target's tensors that are the head's, but not copies of the model's."""
        copies = {f"{self.root}{name}" for name in _COPIES}
        return [name for name in names if name.startswith(self.root) and name not in copies]

    def to_ours(self, name: str) -> str:
        """Return the draft's name of a tensor of the files; an unknown name is returned unchanged."""
        for theirs, ours in self.prefixes.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def to_theirs(self, name: str) -> str:
        """Return the name in the files of one of the draft's tensors."""
        for theirs, ours in self.prefixes.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with experts that are stored one by one as `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I).

    Raises:
        ValueError: a number or a part of an expert is missing.
    """
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.match(name):
            experts.setdefault(found["owner"], {}).setdefault(int(found["number"]), {})[found["part"]] = tensor
        else:
            stacked[name] = tensor
    for owner, numbered in experts.items():
        if set(numbered) != set(range(len(numbered))) or any(len(parts) != 3 for parts in numbered.values()):
            raise ValueError(f"{owner}: experts 0 to {max(numbered)} are not all complete")
        each = [numbered[number] for number in range(len(numbered))]
        stacked[f"{owner}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each])
        stacked[f"{owner}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    return stacked


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with stacked experts one by one: the inverse of `stack_experts`."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        if not owner.endswith(".experts"):
            split[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if part == "gate_up_proj":
                gate, up = expert.chunk(2)
                split[f"{owner}.{number}.gate_proj.weight"] = gate
                split[f"{owner}.{number}.up_proj.weight"] = up
            else:
                split[f"{owner}.{number}.down_proj.weight"] = expert
    return split
