"""`torchrun --nproc-per-node N -m draftworks.programs.train FILE`, or plain `python -m`: train one draft."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftworks.config.draft_options import LayerOptions
from draftworks.config.run_files import VOCAB_FILE, TrainRun
from draftworks.config.strategies import resolve_strategy
from draftworks.data.conversations import QUARANTINE_FILE
from draftworks.data.rejected import RejectedSample, write_rejected
from draftworks.distributed.collectives import gather_from_ranks, open_process_group
from draftworks.distributed.stop_signals import Interrupted, StopRequest, defer_stop
from draftworks.drafts.draft_io import DraftConfig, load_draft, save_draft
from draftworks.drafts.strategy import DraftStrategy
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
from draftworks.storage.artifacts import PARTIAL
from draftworks.storage.files import publish_file
from draftworks.storage.identity import digest
from draftworks.stream.trainer_runtime import ArrivalTraining
from draftworks.stream.training_stream import PLAN_AGAIN, TrainingStream
from draftworks.targets.fitted_defaults import describe_computation
from draftworks.training.backend import ensure_process_group
from draftworks.training.checkpoint_files import read_record
from draftworks.training.checkpoint_manager import BestRule, CheckpointManager, EarlierPlan, find_resume_point
from draftworks.training.controller import StepDiscarded
from draftworks.training.history import ProgressReport, TensorBoardLog, TrainingObserver, render_training_plot
from draftworks.training.tracking import BackgroundTracker, TrackedDraft, flatten_parameters, make_trackers, report_to
from draftworks.training.trainer import Persistence, TrainedWeights, Trainer

HISTORY, PLOT = "history.json", "training.png"
WAITED = "waited_for_features_s"
"""In the report of a streamed training: seconds for which the loader of one rank waited for producers, at most."""
LEFT_OUT = "left_out_samples"
"""In the report of a streamed training: the samples that could not be captured, with the reasons."""
ORDER, ARRIVED = "order", "arrived"
"""In the report of a training in arrival order: the digest of what each step took, and counts of the source's rows."""


@dataclass(frozen=True)
class _Trained:
    """A training that is done, with what is gathered from all ranks."""

    draft: Draft
    trainer: Trainer
    persistence: Persistence
    weights: TrainedWeights
    peaks: list[int]
    waits: list[float]
    left_out: tuple[RejectedSample, ...]
    arrived: dict[str, Any]


def train(run: TrainRun, ctx: ProgramContext) -> dict[str, Any]:
    """Train as the run file says; rank 0 writes the draft, its history and a plot of it into `run.out`.

    SIGTERM and SIGINT end the training after the current step, with a checkpoint. The same run file resumes from it.
    A streamed training plans again, and goes back to a checkpoint, where a sample cannot be captured.
    """
    with (
        open_process_group(run.training.device) as device,
        nullcontext() if run.training.compute_dtype == "float32" else ensure_process_group(device),
        defer_stop() as stop,
    ):
        while (trained := _train(run, ctx, device, stop)) is None:
            if ctx.is_main:
                ctx.log("samples could not be captured: planning again without them")
            gc.collect()  # the former model and its optimizer
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return _publish(run, ctx, trained) if ctx.is_main else {}


def _train(run: TrainRun, ctx: ProgramContext, device: torch.device, stop: StopRequest) -> _Trained | None:
    """Train to the end; None if a streamed training has to plan again."""
    draft = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, run.training.seed)
    if run.training.pack_tokens is not None:
        resolve_strategy(run.strategy).check_packing(draft.options, "training")
    begun = None
    if run.start_from is not None:
        begun = load_draft(run.start_from, draft.strategy, target_digest=None, to_train=True)
    stream = None
    if run.stream is not None and not run.stream.settings.arrives:
        stream = TrainingStream(run.stream, run.training, draft.strategy.feature_names, run.target.name)
    samples = open_samples(
        run.train, run.store, draft.strategy, run.target, None if stream is None else stream.open_source
    )
    held_out = open_samples(run.heldout, run.store, draft.strategy, run.target)
    require_same_dtype(samples, held_out)
    run.out.mkdir(parents=True, exist_ok=True)
    identity = _make_identity(run, draft, samples, held_out, begun)
    persistence = _make_persistence(run, identity, draft, stream)
    trackers = _make_trackers(run, ctx, identity)
    arrival = _open_arrival(run, draft, persistence, stop)
    data = _Data(samples, held_out, stream, arrival)
    observers = [*_make_observers(run, ctx, stream, draft.strategy), *trackers]
    trainer = _make_trainer(run, ctx, device, stop, draft, data, observers, persistence, begun is not None)
    if ctx.is_main:
        ctx.log(_describe_plan(run, draft, samples, trainer, persistence, device))
        if stream is not None:
            ctx.log(stream.describe())
        for own in draft.parts.own if isinstance(draft.options, LayerOptions) else ():
            ctx.log(f"of the draft's own, not the target's: {own}")
    with ctx.doing("looking for supervised held-out tokens"):
        if not trainer.can_evaluate():
            raise make_empty_heldout_error(run.heldout)
    with report_to(trackers), ctx.doing("training"):
        if arrival is not None:
            _fit_arriving(trainer, arrival)
        elif stream is None:
            trainer.fit()
        elif not _fit_streamed(trainer, stream, ctx):
            return None
        _stop_if_asked(trainer)
    return _Trained(
        draft,
        trainer,
        persistence,
        trainer.trained_weights(),
        gather_from_ranks(get_peak_rss_bytes()),
        [] if stream is None else gather_from_ranks(stream.reader.waited_s),
        () if stream is None else stream.left_out,
        {ORDER: arrival.digest_order(), ARRIVED: arrival.count_rows()} if arrival is not None and ctx.is_main else {},
    )


@dataclass(frozen=True)
class _Data:
    """What a training reads: sets, and its end of a stream, in planned or in arrival order, if it has one."""

    train: Samples
    heldout: Samples
    stream: TrainingStream | None
    arrival: ArrivalTraining | None


def _make_trainer(
    run: TrainRun,
    ctx: ProgramContext,
    device: torch.device,
    stop: StopRequest,
    draft: Draft,
    data: _Data,
    observers: list[TrainingObserver],
    persistence: Persistence,
    evaluates_start: bool,
) -> Trainer:
    """Return the trainer of this rank. A collective."""
    stream, arrival = data.stream, data.arrival
    steps = None if stream is None or not ctx.is_main else stream.consumer
    return Trainer(
        draft.strategy,
        build_training_loader(data.train, draft.strategy, run.training, ctx)
        if arrival is None
        else arrival.stream.loader,
        build_evaluation_loader(
            data.heldout, draft.strategy, run.training.micro_batch_size, ctx, get_pack_limits(run.training)
        ),
        run.training if arrival is None else arrival.training,
        device,
        observers,
        persistence,
        lambda: stop.signum or (0 if stream is None else stream.stop_code),
        evaluates_start=evaluates_start,
        steps=steps if arrival is None else arrival.stream.acks,
        discards=None if stream is None else stream.discards,
    )


def _open_arrival(run: TrainRun, draft: Draft, persistence: Persistence, stop: StopRequest) -> ArrivalTraining | None:
    """Return the training's end of a stream in arrival order; None if it has none. A collective."""
    if run.stream is None or not run.stream.settings.arrives:
        return None
    begin = 0 if persistence.resume_from is None else read_record(persistence.resume_from).step
    return ArrivalTraining(run.stream, run.training, draft.strategy, begin, lambda: stop.signum)


def _fit_arriving(trainer: Trainer, arrival: ArrivalTraining) -> None:
    with arrival.stream.follow():
        trainer.fit()
        if not trainer.controller.stopped_by:
            arrival.stream.finish()


def _fit_streamed(trainer: Trainer, stream: TrainingStream, ctx: ProgramContext) -> bool:
    """Train with the stream; False if it has to be planned again. Nothing is left in its store at the end."""
    with stream.follow(trainer.controller.global_step) as is_current:
        if not is_current:
            return False
        try:
            trainer.fit()
        except StepDiscarded:
            return False
        if trainer.controller.stopped_by == PLAN_AGAIN:
            return False
        if ctx.is_main and not trainer.controller.stopped_by:
            stream.finish()
    return True


def _make_persistence(
    run: TrainRun, identity: dict[str, Any], draft: Draft, stream: TrainingStream | None
) -> Persistence:
    training = run.training
    rule = BestRule(training.best_metric, training.best_mode == "min", training.best_min_delta)
    manager = CheckpointManager(
        run.checkpoints,
        run.run_id,
        max_checkpoints=training.keep_checkpoints,
        rule=rule,
        save_async=training.save_async,
    )
    if stream is None or not stream.left_out:
        return Persistence(manager, identity, manager.latest_dir() or run.resume_from)

    def list_earlier() -> Iterator[EarlierPlan]:
        for each in stream.list_earlier_rounds(draft.strategy.feature_names):
            train = {**identity["train"], "features": each.features}
            yield EarlierPlan({**identity, "train": train}, each.common_steps)

    point = find_resume_point(manager, identity, list_earlier)
    if point.folder is None:
        manager.start_over()
    return Persistence(manager, identity, point.folder or run.resume_from, point.identity)


def _make_identity(
    run: TrainRun, draft: Draft, samples: Samples, held_out: Samples, begun: DraftConfig | None
) -> dict[str, Any]:
    """Return everything that decides the weights; a checkpoint with another identity is not resumed.

    Of the features only those that the strategy reads count: other taps in the same set change nothing.
    """
    names, strategy = draft.strategy.feature_names, resolve_strategy(run.strategy)
    arrives = None if run.stream is None else run.stream.settings.identify_arrival()
    return {
        "strategy": run.strategy,
        "options": strategy.identify_options(draft.options, run.target.hidden_size, run.target.num_heads),
        "start_from": None if begun is None else begun.weights_digest,
        "training": run.training.to_identity(strategy.batch_means(draft.options)),
        "target": run.target.digest,
        "vocab_mapping": draft.vocab.digest if draft.vocab else None,
        "train": {
            "tokens": samples.tokens.digest,
            "features": samples.manifest.version_of(names),
            **({} if run.train.read_as == "plain" else {"read_as": run.train.read_as}),
            **({} if arrives is None else {"arrival": arrives}),
        },
        "heldout": {"tokens": held_out.tokens.digest, "features": held_out.manifest.version_of(names)},
    }


def _make_observers(
    run: TrainRun, ctx: ProgramContext, stream: TrainingStream | None, strategy: DraftStrategy
) -> list[TrainingObserver]:
    measured = {"measure": stream.report.measure} if stream is not None and ctx.is_main else {}
    observers: list[TrainingObserver] = [
        ProgressReport(ctx.report_progress, **measured, find_share_done=strategy.find_share_done)
    ]
    if run.training.tensorboard and ctx.is_main:
        observers.append(TensorBoardLog(run.out / "tensorboard"))
    return observers


def _make_trackers(run: TrainRun, ctx: ProgramContext, identity: dict[str, Any]) -> list[BackgroundTracker]:
    """Return the trackers of the training, on rank 0. They are told options and digests, and nothing of the data."""
    if not ctx.is_main:
        return []
    options = {**identity, "training": run.training.model_dump(exclude={"trackers"})}
    name = run.out.name.removesuffix(PARTIAL)
    parameters = flatten_parameters(options)
    draft = TrackedDraft(run.target.name, run.strategy, name, digest(identity), parameters, run.out)
    return make_trackers(run.training.trackers, draft, ctx.log)


def _describe_plan(
    run: TrainRun, draft: Draft, samples: Samples, trainer: Trainer, persistence: Persistence, device: torch.device
) -> str:
    parameters = sum(p.numel() for p in draft.strategy.model.parameters())
    resumed = persistence.resume_from
    begin = f"; going on from {resumed.name}" if resumed else ""
    training = run.training
    packed = f"packed rows of at most {training.pack_tokens} tokens"
    pieces = packed if training.pack_tokens is not None else f"micro-batches of {training.micro_batch_size}"
    arrives = run.stream is not None and run.stream.settings.arrives
    data = "samples as they come" if arrives else f"{len(samples.refs)} samples"
    return (
        f"training {run.strategy} for {run.target.name}: {parameters / 1e6:.2f} M parameters, {data}, "
        f"{trainer.controller.history.total_steps} steps of "
        f"{training.global_batch_size} samples, in {pieces}, {describe_computation(training.compute_dtype, device.type)}{begin}"
    )


def _stop_if_asked(trainer: Trainer) -> None:
    controller = trainer.controller
    if controller.stopped_by:
        raise Interrupted(controller.stopped_by, f" after step {controller.global_step}; its checkpoint is saved")


def _publish(run: TrainRun, ctx: ProgramContext, trained: _Trained) -> dict[str, Any]:
    """Write the results of the training; return its report."""
    draft, trainer, persistence, weights = trained.draft, trained.trainer, trained.persistence, trained.weights
    history = trainer.controller.history
    provenance = {
        **persistence.identity,
        "target": run.target.name,
        "training": run.training.model_dump(mode="json"),
        "steps": history.steps,
        "published_step": weights.step,
        "world_size": ctx.world_size,
        "torch": torch.__version__,
        **({ORDER: trained.arrived[ORDER]} if trained.arrived else {}),
    }
    if draft.vocab is not None:
        draft.vocab.save(run.out / VOCAB_FILE)
    config = save_draft(run.out, trainer.strategy, run.target.digest, weights.tensors, provenance)
    history.save(run.out / HISTORY)
    with publish_file(run.out / PLOT) as staging:
        staging.write_bytes(render_training_plot(history, f"{run.strategy} draft of {run.target.name}", weights.step))
    if trained.left_out:
        write_rejected(run.out / QUARANTINE_FILE, trained.left_out)
    return {
        **_make_report(trainer, persistence.manager, config, weights.step),
        "world_size": len(trained.peaks),
        "peak_rss_bytes": max(trained.peaks),
        **trained.arrived,
        **({WAITED: round(max(trained.waits), 2)} if trained.waits else {}),
        **({LEFT_OUT: {each.sample_id: each.reason for each in trained.left_out}} if trained.left_out else {}),
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
