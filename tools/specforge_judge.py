"""Runs drafts through the real SpecForge 0.2.0: its losses, metric sums, evaluation, logits, and its checkpoints.

Runs in an environment of its own (`make specforge-env`), so it imports nothing of this project:

    TORCHDYNAMO_DISABLE=1 .venv-specforge/bin/python tools/specforge_judge.py REQUEST.json

REQUEST.json is a list of cases, `{"name", "strategy", "folder", "saved", "inputs", "answer", "model", "batches"}`. The
draft in `folder` is built by SpecForge's own `AutoDraftModel` and, where `saved` is a path, written there by its
`save_pretrained`. `inputs` is a safetensors file with the target's `embedding` and `head` (V, H), and the tensors of
every batch as `{number}.{name}`. SpecForge's training model, made with the keywords `model`, and its strategy run on
each of the `batches`; `answer` is a JSON file that gets the loss of each, the model's sums by name, and the result of
SpecForge's Evaluator over all of them.

SpecForge's loss is a Triton kernel, which does not run on a CPU; its reference formula in SpecForge is used instead.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import Tensor, nn


def replace_triton() -> None:
    """Import SpecForge's loss module with a stub for triton, and remove the stub, so that torch does not find it."""
    language = types.ModuleType("triton.language")
    vars(language).update(constexpr=int)
    triton = types.ModuleType("triton")
    vars(triton).update(jit=lambda kernel: kernel, language=language)
    sys.modules |= {"triton": triton, "triton.language": language}
    import specforge.core.loss as loss  # pyright: ignore[reportMissingImports]

    del sys.modules["triton"], sys.modules["triton.language"]
    loss.LogSoftmaxLoss = types.SimpleNamespace(apply=loss._compute_loss)


def make_strategy(case: dict[str, Any], draft: nn.Module, head: nn.Linear, embedding: nn.Embedding) -> Any:
    """Return SpecForge's strategy with its training model."""
    from specforge.algorithms.common import dflash_family_model as blocks  # pyright: ignore[reportMissingImports]
    from specforge.algorithms.eagle3.model import OnlineEagle3Model  # pyright: ignore[reportMissingImports]
    from specforge.algorithms.peagle.model import OnlinePEagleModel  # pyright: ignore[reportMissingImports]
    from specforge.modeling.target.target_head import TargetHead  # pyright: ignore[reportMissingImports]
    from specforge.training.strategies import base  # pyright: ignore[reportMissingImports]

    kind, given = case["strategy"], case["model"]
    if kind in ("eagle3", "peagle"):
        target = TargetHead.__new__(TargetHead)
        nn.Module.__init__(target)
        target.fc = head
        if kind == "eagle3":
            return base.Eagle3TrainStrategy(OnlineEagle3Model(draft, **given), target_head=target)
        return base.PEagleTrainStrategy(OnlinePEagleModel(draft, **given), target_head=target)
    models = {
        "dflash": blocks.OnlineDFlashModel,
        "domino": blocks.OnlineDominoModel,
        "dspark": blocks.OnlineDSparkModel,
    }
    strategies = {"dflash": base.DFlashTrainStrategy, "domino": base.DominoTrainStrategy}
    model = models[kind](draft, head, embedding, attention_backend="sdpa", **given)
    return strategies.get(kind, base.DSparkTrainStrategy)(model)


def read_draft(case: dict[str, Any]) -> Any:
    """Build SpecForge's draft model from a checkpoint as SpecForge's exporters do: only embeddings may be missing.

    Its `from_pretrained` would leave EAGLE-3's rotary buffers as they were allocated.
    """
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig  # pyright: ignore[reportMissingImports]

    folder = Path(case["folder"])
    config = AutoDraftModelConfig.from_file(str(folder / "config.json"))
    if case["strategy"] in ("dflash", "domino", "dspark"):
        config._attn_implementation = "sdpa"
    draft = AutoDraftModel.from_config(config, torch_dtype=torch.float32)
    missing, unexpected = draft.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unexpected or set(missing) - {"embed_tokens.weight"}:
        raise ValueError(f"missing {sorted(missing)}, unexpected {sorted(unexpected)}")
    return draft.eval()


@torch.no_grad()
def judge(case: dict[str, Any]) -> dict[str, Any]:
    from specforge.eval.evaluator import Evaluator  # pyright: ignore[reportMissingImports]
    from specforge.runtime.contracts import TrainBatch  # pyright: ignore[reportMissingImports]

    draft, inputs = read_draft(case), load_file(case["inputs"])
    vocab, width = inputs["head"].shape
    head, embedding = nn.Linear(width, vocab, bias=False), nn.Embedding(vocab, width)
    head.weight.copy_(inputs["head"])
    embedding.weight.copy_(inputs["embedding"])
    if case["strategy"] == "eagle3":
        draft.embed_tokens.weight.copy_(inputs["embedding"])
    if case["saved"]:
        draft.save_pretrained(case["saved"])
    strategy = make_strategy(case, draft, head, embedding)
    batches = []
    for number in range(case["batches"]):
        start = f"{number}."
        tensors = {name.removeprefix(start): each for name, each in inputs.items() if name.startswith(start)}
        batches.append(TrainBatch([str(number)], case["strategy"], tensors, {"target_repr": "hidden_state"}))
    outputs = [strategy.forward_loss(batch) for batch in batches]
    found = {"losses": [float(each.loss) for each in outputs], "sums": [to_json(each.metrics) for each in outputs]}
    return {**found, "evaluation": Evaluator().run(strategy.forward_loss, batches)}


def to_json(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics, those in `ratio_metrics` too, as numbers and lists of numbers."""
    return {name: to_plain(value) for name, value in metrics.items() if name != "ratio_metrics"} | {
        name: to_plain(value) for name, value in metrics.get("ratio_metrics", {}).items()
    }


def to_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [to_plain(each) for each in value] if isinstance(value, list | tuple) else value


def main() -> None:
    replace_triton()
    for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            answer = judge(case)
        except Exception as error:  # any error of SpecForge is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        Path(case["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
