"""Measure a draft beside the same draft untrained and a bigram table: `-m draftworks.programs.evaluate FILE`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from draftworks.data.tokenized import TokenizedSet
from draftworks.drafts.draft_io import load_draft
from draftworks.drafts.supervision import specforge_gates, token_mean_gates
from draftworks.errors import DataError
from draftworks.evaluation.baselines import BigramDraft, BigramTable
from draftworks.evaluation.evaluator import Evaluator, Forward
from draftworks.evaluation.report import Report
from draftworks.evaluation.result import EvalResult
from draftworks.features.loader import FeatureDataLoader
from draftworks.programs.assembly import Draft, Samples, build_draft, open_samples, peak_rss_bytes
from draftworks.programs.process_group import distributed
from draftworks.programs.program import ProgramContext, run_program
from draftworks.runs import EvaluateRun

EVAL_SET = "heldout"


def evaluate(run: EvaluateRun, ctx: ProgramContext) -> dict[str, Any]:
    """Evaluate all three on the held-out set; rank 0 writes the report into `run.out`."""
    started = time.perf_counter()
    with distributed(run.device) as device:
        draft = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, run.seed)
        draft.strategy.model.to(device)
        samples = open_samples(run.heldout, run.store, draft.strategy, run.target)
        measure = partial(_measure, run, ctx, draft, samples, device)
        untrained = measure("untrained", draft.strategy.forward_loss)
        config = load_draft(run.draft, draft.strategy, run.target.digest)
        trained = measure("trained", draft.strategy.forward_loss)
        bigram = measure("bigram", _bigram(run, draft, device))
    provenance = {
        "target_digest": run.target.digest,
        "weights_digest": config.weights_digest,
        "eval_tokens": samples.tokens.digest,
        "eval_features": samples.manifest.data_version,
        "untrained_seed": run.seed,
    }
    drafts = {"trained": trained, "untrained": untrained, "bigram": bigram}
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
    ctx: ProgramContext,
    draft: Draft,
    samples: Samples,
    device: torch.device,
    name: str,
    forward: Forward,
) -> EvalResult:
    loader = FeatureDataLoader.for_evaluation(
        samples.refs,
        samples.store,
        run.micro_batch_size,
        draft.strategy.collate,
        rank=ctx.rank,
        world=ctx.world_size,
    )
    result = Evaluator(device).run(forward, loader)
    if result is None:
        raise DataError(f"{run.heldout.tokens}: the eval set has no supervised token a draft could be measured on")
    if ctx.is_main:
        ctx.log(f"{name}: simulated_acc_len {result.simulated_acc_len:.3f} (rung 1), accuracy {result.avg_acc:.3f}")
    return result


def _bigram(run: EvaluateRun, draft: Draft, device: torch.device) -> BigramDraft:
    """The table, counted like the draft: as many steps, and the rows that the draft's loss mode supervises."""
    table = BigramTable.count(TokenizedSet.open(run.train_tokens), draft.parts.vocab_size)
    gates = specforge_gates if draft.options.loss == "specforge" else token_mean_gates
    return BigramDraft(table, draft.parts.head.to(device), draft.options.ttt_length, gates)


if __name__ == "__main__":
    run_program(EvaluateRun, evaluate)
