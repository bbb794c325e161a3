"""What the real speculators library makes of exported drafts: which tensors it takes, and the logits it computes.

Runs in an environment of its own (`make speculators-env`), so it imports nothing of this project:

    .venv-speculators/bin/python tools/speculators_logits.py REQUEST.json ANSWER.json

REQUEST.json is a list of cases, `{"name", "folder", "attention": "eager" | "sdpa", "inputs", "logits", "saved"}`. `inputs` is
a safetensors file with `features` (n, taps · H), `next_tokens` (n,) and `drawn` (k,); the logits (k, V_d) of the steps that
drew those tokens are written to `logits`, and where there is a confidence head, `confidence` (k,). Both are null to load only. `saved`, or null, is a folder in which the library
saves what it loaded. ANSWER.json maps names to what was found, see `Verdict`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.peagle.data import generate_cod_sample_indices
from torch import Tensor, nn

EAGER_TV = resolve_loss_config("tv", "eager")["tv"][0]


@dataclass
class Verdict:
    """How the file and the loaded model differ. A folder is right when there is no error and the lists are empty.

    Attributes:
        error: what the library raised, if anything.
        missing: tensors that the library would have saved and the file does not hold.
        extra: tensors of the file that the model does not have.
        unequal: tensors that are in both and differ.
    """

    error: str | None = None
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)


def load(folder: str, attention: str) -> SpeculatorModel:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = attention
    return SpeculatorModel.from_pretrained(folder, config=config).eval()


def compare(model: SpeculatorModel, tensors: dict[str, Tensor]) -> Verdict:
    state = model.state_dict()
    saved = state.keys() - set(model._keys_to_ignore_on_save)
    both = sorted(state.keys() & tensors.keys())
    return Verdict(
        missing=sorted(saved - tensors.keys()),
        extra=sorted(tensors.keys() - saved),
        unequal=[name for name in both if not torch.equal(state[name], tensors[name])],
    )


def eagle3_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """The chain after row n-1. In training the library gives step i of row t the token t+1+i of the text; so the text here
    is the given tokens, then the drawn ones. Rows after n-1 are padding that row n-1 does not see."""
    features, drawn = inputs["features"], inputs["drawn"]
    rows, steps = len(features), len(drawn)
    length = rows + steps - 1
    padded = torch.cat([features, features.new_zeros(steps - 1, features.shape[1])])
    heads = record(model.lm_head)
    model(
        hidden_states=padded[None],
        input_ids=torch.cat([inputs["next_tokens"], drawn[:-1]])[None],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        position_ids=torch.arange(length)[None],
        ttt_steps=steps,
    )
    return torch.stack([logits[0, rows - 1] for logits in heads])


def peagle_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """The chain of masks after row n-1. Which chains the library computes it draws from the loss mask; a ratio above all
    counts makes it keep every place, and the first one in the mask is that of the wanted chain's depth 1."""
    features, rows, steps = inputs["features"], len(inputs["features"]), len(inputs["drawn"])
    length = rows + steps
    mask = torch.arange(length) >= rows
    sampling = {"num_depths": steps, "down_sample_ratio": float(length + 1), "down_sample_ratio_min": 1.0}
    heads = record(model.lm_head)
    model(
        hidden_states=torch.cat([features, features.new_zeros(steps, features.shape[1])])[None],
        input_ids=torch.cat([inputs["next_tokens"], torch.zeros(steps, dtype=torch.long)])[None],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        loss_mask=mask[None],
        verifier_last_hidden_states=features.new_zeros(1, length, model.hidden_size),
        loss_config=resolve_loss_config("kl_div", "eager"),
        **sampling,
    )
    anchor, _ = generate_cod_sample_indices(length, mask[None], **sampling)
    return heads[0][0, anchor == rows - 1]


def dflash_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    heads = record(model.lm_head)
    run_block(model, inputs)
    return heads[0][0, 1 : 1 + len(inputs["drawn"])]


def dspark_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """The head's logits and what the Markov head adds: for all of the block at once, or place by place."""
    drawn, heads = len(inputs["drawn"]), record(model.lm_head)
    biases = [] if model.markov_head is None else record(model.markov_head.markov_w2)
    run_block(model, inputs, tv_loss_fn=EAGER_TV)
    bias = torch.cat([added.flatten(0, -2) for added in biases])[:drawn] if biases else 0
    return heads[0][0, :drawn] + bias


def dspark_confidence(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor | None:
    if model.confidence_head is None:
        return None
    confidences = record(model.confidence_head)
    run_block(model, inputs, tv_loss_fn=EAGER_TV)
    return confidences[0][0, : len(inputs["drawn"])]


def run_block(model: SpeculatorModel, inputs: dict[str, Tensor], **losses: Any) -> None:
    """The block after an anchor at position n. The library draws anchors from the loss mask, and none from the last
    block_size positions; so the mask has one place, and the features go on after it with padding that nobody sees. In training
    it takes the words of the block from the text, which are the drawn ones here."""
    features, rows, drawn = inputs["features"], len(inputs["features"]), inputs["drawn"]
    length = rows + 1 + model.block_size
    text = torch.zeros(1, length, dtype=torch.long)
    text[0, rows : rows + len(drawn)] = torch.cat([inputs["next_tokens"][-1:], drawn[:-1]])
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, rows] = True
    model(
        hidden_states=torch.cat([features, features.new_zeros(length - rows, features.shape[1])])[None],
        input_ids=text,
        loss_mask=mask,
        verifier_last_hidden_states=features.new_zeros(1, length, model.hidden_size),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        position_ids=torch.arange(length)[None],
        max_anchors=1,
        loss_config=resolve_loss_config("kl_div", "eager"),
        **losses,
    )


def record(module: nn.Module) -> list[Tensor]:
    """The forward pass returns losses; what decides them is what its modules put out."""
    outputs: list[Tensor] = []
    module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    return outputs


LOGITS = {"eagle3": eagle3_logits, "peagle": peagle_logits, "dflash": dflash_logits, "dspark": dspark_logits}


@torch.no_grad()
def judge(case: dict[str, str]) -> Verdict:
    try:
        model = load(case["folder"], case["attention"])
        verdict = compare(model, load_file(Path(case["folder"]) / "model.safetensors"))
        if case["saved"]:
            model.save_pretrained(case["saved"])
        if case["inputs"]:
            # In at least fp32, so that what is compared is the computation and not its rounding.
            kind, inputs = model.config.speculators_model_type, load_file(case["inputs"])
            said = {"logits": LOGITS[kind](model.float(), inputs)}
            if kind == "dspark":
                said["confidence"] = dspark_confidence(model, inputs)
            save_file({name: found.contiguous() for name, found in said.items() if found is not None}, case["logits"])
    except Exception as error:  # whatever the library raises is the answer
        return Verdict(error=f"{type(error).__name__}: {error}")
    return verdict


def main() -> None:
    request, answer = sys.argv[1:]
    cases = json.loads(Path(request).read_text(encoding="utf-8"))
    verdicts = {case["name"]: asdict(judge(case)) for case in cases}
    Path(answer).write_text(json.dumps(verdicts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
