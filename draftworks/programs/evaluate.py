"""Measure a draft beside the same draft untrained and a bigram table: `-m draftworks.programs.evaluate FILE`.

The table makes a chain of proposals, so it is left out where the strategy does not.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from draftworks.data.tokenized import TokenizedSet
from draftworks.drafts.draft_io import load_draft
from draftworks.drafts.strategy import ChainStrategy
from draftworks.evaluation.baselines import BigramDraft, BigramTable
from draftworks.evaluation.evaluator import Evaluator, Forward
from draftworks.evaluation.report import Report
from draftworks.evaluation.result import EvalResult
from draftworks.features.loader import FeatureDataLoader
from draftworks.programs.assembly import Draft, build_draft, open_samples, peak_rss_bytes
from draftworks.programs.loaders import evaluation_loader, nothing_to_measure
from draftworks.programs.process_group import distributed
from draftworks.programs.program import ProgramContext, run_program
from draftworks.runs import EvaluateRun

EVAL_SET = "heldout"


def evaluate(run: EvaluateRun, ctx: ProgramContext) -> dict[str, Any]:
    """Evaluate all of them on the held-out set; rank 0 writes the report into `run.out`."""
    started = time.perf_counter()
    with distributed(run.device) as device:
        draft = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, run.seed)
        strategy = draft.strategy
        strategy.model.to(device)
        samples = open_samples(run.heldout, run.store, strategy, run.target)
        loader = evaluation_loader(samples, strategy, run.micro_batch_size, ctx)
        measure = partial(_measure, run, loader, ctx, device)
        untrained = measure("untrained", strategy.forward_loss)
        config = load_draft(run.draft, strategy, run.target.digest)
        drafts = {"trained": measure("trained", strategy.forward_loss), "untrained": untrained}
        if isinstance(strategy, ChainStrategy):
            drafts["bigram"] = measure("bigram", _bigram(run, draft, strategy, device))
    provenance = {
        "target_digest": run.target.digest,
        "weights_digest": config.weights_digest,
        "eval_tokens": samples.tokens.digest,
        "eval_features": samples.manifest.data_version,
        "untrained_seed": run.seed,
    }
    report = Report(run.target.name, run.strategy, EVAL_SET, drafts, provenance)
    if ctx.is_main:
        report.save(run.out)
    return {
        "drafts": {name: result.metrics() for name, result in drafts.items()},
        "seconds": time.perf_counter() - started,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _measure(
    run: EvaluateRun,
    loader: FeatureDataLoader,
    ctx: ProgramContext,
    device: torch.device,
    name: str,
    forward: Forward,
) -> EvalResult:
    result = Evaluator(device).run(forward, loader)
    if result is None:
        raise nothing_to_measure(run.heldout)
    if ctx.is_main:
        ctx.log(f"{name}: simulated_acc_len {result.simulated_acc_len:.3f} (rung 1), accuracy {result.avg_acc:.3f}")
    return result


def _bigram(run: EvaluateRun, draft: Draft, strategy: ChainStrategy, device: torch.device) -> BigramDraft:
    """The table, counted as the draft is: the same rows at the same steps."""
    table = BigramTable.count(TokenizedSet.open(run.train_tokens), draft.parts.vocab_size)
    return BigramDraft(table, draft.parts.head.to(device), strategy.chain_gates)


if __name__ == "__main__":
    run_program(EvaluateRun, evaluate)
