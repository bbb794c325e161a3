"""`torchrun --nproc-per-node N -m draftworks.programs.train FILE`, or plain `python -m`: train one draft."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from draftworks.config.run_files import VOCAB_FILE, TrainRun
from draftworks.config.strategies import resolve_strategy
from draftworks.distributed.collectives import gather_from_ranks
from draftworks.distributed.process_group import open_process_group
from draftworks.distributed.stop_signals import Interrupted, defer_stop
from draftworks.drafts.draft_io import DraftConfig, load_draft, save_draft
from draftworks.programs.assembly import (
    Draft,
    Samples,
    build_draft,
    build_evaluation_loader,
    build_training_loader,
    get_pack_limits,
    get_peak_rss_bytes,
    make_empty_heldout_error,
    open_samples,
    require_same_dtype,
)
from draftworks.programs.program import ProgramContext, run_program
from draftworks.runtime.training_stream import TrainingStream
from draftworks.storage.atomic import publish_file
from draftworks.training.backend import ensure_process_group
from draftworks.training.best import BestRule
from draftworks.training.checkpoint_files import read_record
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.observers import ProgressReport, TensorBoardLog, TrainingObserver
from draftworks.training.plots import render_training_plot
from draftworks.training.trainer import Persistence, TrainedWeights, Trainer

HISTORY, PLOT = "history.json", "training.png"
WAITED = "waited_for_features_s"
"""In the report of a streamed training: seconds for which the loader of one rank waited for producers, at most."""


def train(run: TrainRun, ctx: ProgramContext) -> dict[str, Any]:
    """Train as the run file says; rank 0 writes the draft, its history and a plot of it into `run.out`.

    SIGTERM and SIGINT end the training after the current step, with a checkpoint. The same run file resumes from it.
    """
    with open_process_group(run.training.device) as device, ensure_process_group(device), defer_stop() as stop:
        draft = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, run.training.seed)
        if run.training.pack_tokens is not None:
            resolve_strategy(run.strategy).check_packing(draft.options, "training")
        begun = None
        if run.start_from is not None:
            begun = load_draft(run.start_from, draft.strategy, target_digest=None, to_train=True)
        stream = None if run.stream is None else TrainingStream(run.stream, run.training, draft.strategy.feature_names)
        samples = open_samples(
            run.train, run.store, draft.strategy, run.target, None if stream is None else stream.open_reader
        )
        held_out = open_samples(run.heldout, run.store, draft.strategy, run.target)
        require_same_dtype(samples, held_out)
        run.out.mkdir(parents=True, exist_ok=True)
        persistence = _make_persistence(run, _make_identity(run, draft, samples, held_out, begun))
        trainer = Trainer(
            draft.strategy,
            build_training_loader(samples, draft.strategy, run.training, ctx),
            build_evaluation_loader(
                held_out, draft.strategy, run.training.micro_batch_size, ctx, get_pack_limits(run.training)
            ),
            run.training,
            device,
            _make_observers(run, ctx),
            persistence,
            lambda: stop.signum,
            evaluates_start=begun is not None,
            steps=None if stream is None or not ctx.is_main else stream.consumer,
        )
        if ctx.is_main:
            ctx.log(_describe_plan(run, draft, samples, trainer, persistence))
            if stream is not None:
                ctx.log(stream.describe())
            for own in draft.parts.own:
                ctx.log(f"of the draft's own, not the target's: {own}")
        if not trainer.can_evaluate():
            raise make_empty_heldout_error(run.heldout)
        with nullcontext() if stream is None else stream.follow(trainer.controller.global_step):
            trainer.fit()
            if stream is not None and ctx.is_main and not trainer.controller.stopped_by:
                stream.consumer.finish()
        _stop_if_asked(trainer)
        weights = trainer.trained_weights()
        peaks = gather_from_ranks(get_peak_rss_bytes())
        waits = [] if stream is None else gather_from_ranks(stream.reader.waited_s)
    if not ctx.is_main:
        return {}
    waited = {WAITED: round(max(waits), 2)} if waits else {}
    return {**_publish(run, ctx, draft, trainer, persistence, weights, peaks), **waited}


def _make_persistence(run: TrainRun, identity: dict[str, Any]) -> Persistence:
    training = run.training
    rule = BestRule(training.best_metric, training.best_mode == "min", training.best_min_delta)
    manager = CheckpointManager(
        run.checkpoints,
        run.run_id,
        max_checkpoints=training.keep_checkpoints,
        rule=rule,
        save_async=training.save_async,
    )
    return Persistence(manager, identity, manager.latest_dir() or run.resume_from)


def _make_identity(
    run: TrainRun, draft: Draft, samples: Samples, held_out: Samples, begun: DraftConfig | None
) -> dict[str, Any]:
    """Return everything that decides the weights; a checkpoint with another identity is not resumed.

    Of the features only those that the strategy reads count: other taps in the same set change nothing.
    """
    names = draft.strategy.feature_names
    return {
        "strategy": run.strategy,
        "options": resolve_strategy(run.strategy).identify_options(
            draft.options, run.target.hidden_size, run.target.num_heads
        ),
        "start_from": None if begun is None else begun.weights_digest,
        "training": run.training.to_identity(),
        "target": run.target.digest,
        "vocab_mapping": draft.vocab.digest if draft.vocab else None,
        "train": {"tokens": samples.tokens.digest, "features": samples.manifest.version_of(names)},
        "heldout": {"tokens": held_out.tokens.digest, "features": held_out.manifest.version_of(names)},
    }


def _make_observers(run: TrainRun, ctx: ProgramContext) -> list[TrainingObserver]:
    observers: list[TrainingObserver] = [ProgressReport(ctx.report_progress)]
    if run.training.tensorboard and ctx.is_main:
        observers.append(TensorBoardLog(run.out / "tensorboard"))
    return observers


def _describe_plan(run: TrainRun, draft: Draft, samples: Samples, trainer: Trainer, persistence: Persistence) -> str:
    parameters = sum(p.numel() for p in draft.strategy.model.parameters())
    resumed = persistence.resume_from
    begin = f"; going on from {resumed.name}" if resumed else ""
    training = run.training
    packed = f"packed rows of at most {training.pack_tokens} tokens"
    pieces = packed if training.pack_tokens is not None else f"micro-batches of {training.micro_batch_size}"
    return (
        f"training {run.strategy} for {run.target.name}: {parameters / 1e6:.2f} M parameters, "
        f"{len(samples.refs)} samples, {trainer.controller.history.total_steps} steps of "
        f"{training.global_batch_size} samples, in {pieces}{begin}"
    )


def _stop_if_asked(trainer: Trainer) -> None:
    controller = trainer.controller
    if controller.stopped_by:
        raise Interrupted(controller.stopped_by, f" after step {controller.global_step}; its checkpoint is saved")


def _publish(
    run: TrainRun,
    ctx: ProgramContext,
    draft: Draft,
    trainer: Trainer,
    persistence: Persistence,
    weights: TrainedWeights,
    peaks: list[int],
) -> dict[str, Any]:
    """Write the results of the training; return its report."""
    history = trainer.controller.history
    provenance = {
        **persistence.identity,
        "target": run.target.name,
        "training": run.training.model_dump(mode="json"),
        "steps": history.steps,
        "published_step": weights.step,
        "world_size": ctx.world_size,
        "torch": torch.__version__,
    }
    if draft.vocab is not None:
        draft.vocab.save(run.out / VOCAB_FILE)
    config = save_draft(run.out, trainer.strategy, run.target.digest, weights.tensors, provenance)
    history.save(run.out / HISTORY)
    with publish_file(run.out / PLOT) as staging:
        staging.write_bytes(render_training_plot(history, f"{run.strategy} draft of {run.target.name}", weights.step))
    return {
        **_make_report(trainer, persistence.manager, config, weights.step),
        "world_size": len(peaks),
        "peak_rss_bytes": max(peaks),
    }


def _make_report(
    trainer: Trainer, manager: CheckpointManager, config: DraftConfig, published_step: int
) -> dict[str, Any]:
    history, best = trainer.controller.history, manager.best
    evaluation = history.find_evaluation(published_step)
    heldout = evaluation.metrics() if evaluation is not None else best.metrics if best is not None else {}
    return {
        "strategy": config.strategy,
        "weights_digest": config.weights_digest,
        "steps": history.steps,
        "published_step": published_step,
        "ended_early": trainer.controller.ended_early,
        "tokens": history.tokens,
        "seconds": history.seconds,
        "tokens_per_s": history.tokens_per_s,
        "first_loss": history.first_loss(),
        "last_loss": history.last_loss(),
        "heldout": heldout,
        "best": None if best is None else {"step": best.step, "metric": best.metric, "score": best.score},
        "sessions": [
            {"from_step": s.start_step, "ranks": s.world_size, "started": s.started} for s in history.sessions
        ],
        "checkpoints": [_describe_checkpoint(manager.folder.final(step)) for step in manager.steps()],
    }


def _describe_checkpoint(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    return {"name": folder.name, "step": record.step, "bytes": record.bytes, "ranks": record.world_size}


if __name__ == "__main__":
    run_program(TrainRun, train)
