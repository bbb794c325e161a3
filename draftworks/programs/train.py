"""Train one draft: `torchrun --nproc-per-node N -m draftworks.programs.train FILE`, or plain `python -m`."""

from __future__ import annotations

from typing import Any

import torch

from draftworks.drafts.draft_io import DraftConfig, save_draft
from draftworks.evaluation.collectives import gather_from_ranks
from draftworks.programs.assembly import Draft, Samples, build_draft, open_samples, peak_rss_bytes
from draftworks.programs.loaders import evaluation_loader, nothing_to_measure, training_loader
from draftworks.programs.process_group import distributed
from draftworks.programs.program import ProgramContext, run_program
from draftworks.publishing import published
from draftworks.runs import TrainRun
from draftworks.training.backend import process_group_of_one
from draftworks.training.history import History
from draftworks.training.observers import ProgressReport, TensorBoardLog, TrainingObserver
from draftworks.training.plots import training_plot
from draftworks.training.trainer import Trainer

HISTORY, PLOT = "history.json", "training.png"


def train(run: TrainRun, ctx: ProgramContext) -> dict[str, Any]:
    """Train as the run file says; rank 0 writes the draft, its history and a picture of it into `run.out`."""
    with distributed(run.training.device) as device, process_group_of_one(device):
        draft = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, run.training.seed)
        samples = open_samples(run.train, run.store, draft.strategy, run.target)
        held_out = open_samples(run.heldout, run.store, draft.strategy, run.target)
        run.out.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(
            draft.strategy,
            training_loader(samples, draft.strategy, run.training, ctx),
            evaluation_loader(held_out, draft.strategy, run.training.micro_batch_size, ctx),
            run.training,
            device,
            _observers(run, ctx),
        )
        if ctx.is_main:
            ctx.log(_plan(run, draft, samples, trainer))
        if not trainer.can_evaluate():
            raise nothing_to_measure(run.heldout)
        history = trainer.fit()
        weights = trainer.weights()
        peaks = gather_from_ranks(peak_rss_bytes())
    if not ctx.is_main:
        return {}
    provenance = _provenance(run, ctx, draft, samples, history)
    config = save_draft(run.out, draft.strategy, run.target.digest, weights, provenance)
    history.save(run.out / HISTORY)
    with published(run.out / PLOT) as staging:
        staging.write_bytes(training_plot(history, f"{run.strategy} draft of {run.target.name}"))
    return _report(history, config, peaks)


def _observers(run: TrainRun, ctx: ProgramContext) -> list[TrainingObserver]:
    observers: list[TrainingObserver] = [ProgressReport(ctx.progress)]
    if run.training.tensorboard and ctx.is_main:
        observers.append(TensorBoardLog(run.out / "tensorboard"))
    return observers


def _plan(run: TrainRun, draft: Draft, samples: Samples, trainer: Trainer) -> str:
    parameters = sum(p.numel() for p in draft.strategy.model.parameters())
    plan = trainer.controller.history
    return (
        f"training {run.strategy} for {run.target.name}: {parameters / 1e6:.2f} M parameters, "
        f"{len(samples.refs)} samples, {plan.total_steps} steps of {run.training.global_batch_size} samples "
        f"({trainer.core.accumulation_steps} micro-steps of {run.training.micro_batch_size} per rank)"
    )


def _provenance(run: TrainRun, ctx: ProgramContext, draft: Draft, samples: Samples, history: History) -> dict[str, Any]:
    return {
        "target": run.target.name,
        "training": run.training.model_dump(mode="json"),
        "train_tokens": samples.tokens.digest,
        "train_features": samples.manifest.data_version,
        "vocab_mapping": draft.vocab.digest if draft.vocab else None,
        "steps": history.steps,
        "world_size": ctx.world_size,
        "torch": torch.__version__,
    }


def _report(history: History, config: DraftConfig, peaks: list[int]) -> dict[str, Any]:
    return {
        "strategy": config.strategy,
        "weights_digest": config.weights_digest,
        "steps": history.steps,
        "tokens": history.tokens,
        "seconds": history.seconds,
        "tokens_per_s": history.tokens_per_s,
        "first_loss": history.first_loss(),
        "last_loss": history.last_loss(),
        "heldout": history.evals[-1].result.metrics(),
        "world_size": len(peaks),
        "peak_rss_bytes": max(peaks),
    }


if __name__ == "__main__":
    run_program(TrainRun, train)
