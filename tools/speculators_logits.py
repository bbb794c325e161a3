"""Runs exported drafts through the real speculators library: which tensors it loads, and the logits it computes.

Runs in an environment of its own (`make speculators-env`), so it imports nothing of this project:

    .venv-speculators/bin/python tools/speculators_logits.py REQUEST.json ANSWER.json

REQUEST.json is a list of cases, `{"name", "folder", "attention": "eager" | "sdpa", "inputs", "logits", "saved"}`.
`inputs` is a safetensors file with `features` (n, taps · H), `next_tokens` (n,) and `drawn` (k,). `logits` is the file
that gets the logits (k, V_d) of the draft steps that drew those tokens and, with a confidence head, `confidence` (k,).
Both are null to load only. `saved`, or null, is a folder in which the library saves the loaded model. ANSWER.json maps
names to a `Verdict`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig  # pyright: ignore[reportMissingImports]
from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]
from speculators.models.dflash2.metrics import (  # pyright: ignore[reportMissingImports]
    compute_metrics as compute_dflash2_metrics,
)
from speculators.models.dflash2.metrics import selector_training_candidates  # pyright: ignore[reportMissingImports]
from speculators.models.peagle.data import generate_cod_sample_indices  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

EAGER_TV = resolve_loss_config("tv", "eager")["tv"][0]


@dataclass
class Verdict:
    """Differences between the file and the loaded model. A folder is right if `error` is None and the lists are empty.

    Attributes:
        error: the error that the library raised.
        missing: tensors that the library would have saved and the file does not have.
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


def compute_eagle3_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of the chain after position n-1.

    In training the library gives draft step i at position t the token t+1+i of the text; so the text here is the given
    tokens, then the drawn ones. Positions after n-1 are padding that position n-1 does not see.
    """
    features, drawn = inputs["features"], inputs["drawn"]
    positions, steps = len(features), len(drawn)
    length = positions + steps - 1
    padded = torch.cat([features, features.new_zeros(steps - 1, features.shape[1])])
    heads = record_outputs(model.lm_head)
    model(
        hidden_states=padded[None],
        input_ids=torch.cat([inputs["next_tokens"], drawn[:-1]])[None],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        position_ids=torch.arange(length)[None],
        ttt_steps=steps,
    )
    return torch.stack([logits[0, positions - 1] for logits in heads])


def compute_peagle_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of the chain of masks after position n-1.

    The library draws the chains to compute from the loss mask; a ratio above all counts makes it keep every place, and
    the first one in the mask is depth 1 of the wanted chain.
    """
    features, positions, steps = inputs["features"], len(inputs["features"]), len(inputs["drawn"])
    length = positions + steps
    mask = torch.arange(length) >= positions
    sampling = {"num_depths": steps, "down_sample_ratio": float(length + 1), "down_sample_ratio_min": 1.0}
    heads = record_outputs(model.lm_head)
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
    return heads[0][0, anchor == positions - 1]


def compute_dflash_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    heads = record_outputs(model.lm_head)
    run_block(model, inputs)
    return heads[0][0, 1 : 1 + len(inputs["drawn"])]


def compute_dflash2_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the scores of the selector's candidates; -inf for all other tokens."""
    block = run_dflash2(model, inputs)
    candidates, scores = model.candidate_selector.select(block.unary, block.hidden, block.before)
    return torch.full_like(block.unary, -torch.inf).scatter(1, candidates, scores)


def compute_dflash2_losses(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropies (2,) of the head and of the selector, had the drawn tokens been the target's choices."""
    block, selector, labels = run_dflash2(model, inputs), model.candidate_selector, inputs["drawn"]
    candidates = block.unary.topk(selector.top_k, dim=-1).indices
    taught, places, contained = selector_training_candidates(candidates, labels)
    scores = selector.score_candidates(block.unary, block.hidden, block.before, taught)
    certain = 1e4 * nn.functional.one_hot(labels, block.unary.shape[1]).float()
    counts = torch.cat([torch.zeros(1), torch.ones(len(labels))])  # the anchor's own place does not
    after_anchor = (
        torch.cat([rows[:1], rows])[None] for rows in (block.unary, certain, taught, scores, places, contained)
    )
    _, metrics = compute_dflash2_metrics(
        *after_anchor,
        loss_mask=counts[None],
        block_size=len(counts),
        top_k=selector.top_k,
        loss_config=resolve_loss_config("ce", "eager"),
        tv_loss_fn=EAGER_TV,
        gamma=4.0,
    )
    return torch.stack([metrics[f"{part}_loss_sum"] for part in ("unary", "selector")])


class DFlash2Block(NamedTuple):
    """Of the proposing places: logits (k, V), states (k, H) as the head reads them, and the tokens before them (k,)."""

    unary: Tensor
    hidden: Tensor
    before: Tensor


def run_dflash2(model: SpeculatorModel, inputs: dict[str, Tensor]) -> DFlash2Block:
    drawn, heads, states = inputs["drawn"], record_outputs(model.lm_head), record_outputs(model.norm)
    run_block(model, inputs, tv_loss_fn=EAGER_TV)
    unary, hidden = (outputs[0][0, 1 : 1 + len(drawn)] for outputs in (heads, states))
    return DFlash2Block(unary, hidden, torch.cat([inputs["next_tokens"][-1:], drawn[:-1]]))


def compute_dspark_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the head's logits plus those of the Markov head, which runs once per block or once per place."""
    drawn, heads = len(inputs["drawn"]), record_outputs(model.lm_head)
    biases = [] if model.markov_head is None else record_outputs(model.markov_head.markov_w2)
    run_block(model, inputs, tv_loss_fn=EAGER_TV)
    bias = torch.cat([added.flatten(0, -2) for added in biases])[:drawn] if biases else 0
    return heads[0][0, :drawn] + bias


def compute_dspark_confidence(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor | None:
    if model.confidence_head is None:
        return None
    confidences = record_outputs(model.confidence_head)
    run_block(model, inputs, tv_loss_fn=EAGER_TV)
    return confidences[0][0, : len(inputs["drawn"])]


def compute_xpress_logits(model: SpeculatorModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits after the last Jacobi pass, of which the library has the parts. The anchor's place is
    given the anchor's own token, as vLLM's #54448 does.

    `from_pretrained` of 0.9.0 leaves the mask of the causal mix as the memory had it: a buffer that is in no checkpoint.
    """
    model.refiner_head.causal_tril = torch.ones_like(model.refiner_head.causal_tril).tril()
    states, heads = record_outputs(model.norm), record_outputs(model.lm_head)
    run_block(model, inputs)
    anchor, logits = inputs["next_tokens"][-1:, None], heads[0]
    for _ in range(model.config.num_jacobi_passes):
        chosen = model._draft_to_verifier_ids(logits.argmax(-1))
        previous = torch.cat([anchor, anchor, chosen[:, 1:-1]], dim=1)
        logits = heads[0] + model.refiner_head.block_bias(previous, hidden_states=states[0])
    return logits[0, 1 : 1 + len(inputs["drawn"])]


def run_block(model: SpeculatorModel, inputs: dict[str, Tensor], **losses: Any) -> None:
    """Run the block after an anchor at position n.

    The library draws anchors from the loss mask, and none from the last block_size positions; so the mask has one
    position, and the features continue after it with padding that nothing attends to. In training the library takes
    the tokens of the block from the text, which are the drawn ones here.
    """
    features, positions, drawn = inputs["features"], len(inputs["features"]), inputs["drawn"]
    length = positions + 1 + model.block_size
    text = torch.zeros(1, length, dtype=torch.long)
    text[0, positions : positions + len(drawn)] = torch.cat([inputs["next_tokens"][-1:], drawn[:-1]])
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, positions] = True
    model(
        hidden_states=torch.cat([features, features.new_zeros(length - positions, features.shape[1])])[None],
        input_ids=text,
        loss_mask=mask,
        verifier_last_hidden_states=features.new_zeros(1, length, model.hidden_size),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        position_ids=torch.arange(length)[None],
        max_anchors=1,
        loss_config=resolve_loss_config("kl_div", "eager"),
        **losses,
    )


def record_outputs(module: nn.Module) -> list[Tensor]:
    """Collect the outputs of a module: the forward pass of the library returns only losses."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs.append(output)

    module.register_forward_hook(record)
    return outputs


LOGITS = {
    "eagle3": compute_eagle3_logits,
    "peagle": compute_peagle_logits,
    "dflash": compute_dflash_logits,
    "dflash2": compute_dflash2_logits,
    "dspark": compute_dspark_logits,
    "xpress": compute_xpress_logits,
}


@torch.no_grad()
def judge(case: dict[str, str]) -> Verdict:
    try:
        model = load(case["folder"], case["attention"])
        verdict = compare(model, load_file(Path(case["folder"]) / "model.safetensors"))
        if case["saved"]:
            model.save_pretrained(case["saved"])
        if case["inputs"]:
            # In fp32, so that the computation is compared and not its rounding.
            kind, inputs = model.config.speculators_model_type, load_file(case["inputs"])
            outputs: dict[str, Tensor | None] = {"logits": LOGITS[kind](model.float(), inputs)}
            if kind == "dspark":
                outputs["confidence"] = compute_dspark_confidence(model, inputs)
            if kind == "dflash2":
                outputs["losses"] = compute_dflash2_losses(model, inputs)
            save_file({name: each.contiguous() for name, each in outputs.items() if each is not None}, case["logits"])
    except Exception as error:  # any error of the library is the answer
        return Verdict(error=f"{type(error).__name__}: {error}")
    return verdict


def main() -> None:
    request, answer = sys.argv[1:]
    cases = json.loads(Path(request).read_text(encoding="utf-8"))
    verdicts = {case["name"]: asdict(judge(case)) for case in cases}
    Path(answer).write_text(json.dumps(verdicts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
