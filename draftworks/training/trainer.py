"""`Trainer`: builds a training from a strategy, its data and hyper-parameters, runs it and resumes it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draftworks.config.registry_files import TrainingSpec
from draftworks.distributed.collectives import get_local_world_size, get_rank
from draftworks.drafts.draft_io import read_weights
from draftworks.drafts.layers import GatedMlp, RmsNorm, compile_for_many_kinds
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.errors import ConfigError
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.ladder.replay import forward_with_replay
from draftworks.evaluation.result import BLOCK_METRIC, WALK_METRIC, EvalResult
from draftworks.features.loader import FeatureDataLoader, TrainingLoader
from draftworks.training.backend import SingleTrainingBackend, TrainingBackend
from draftworks.training.checkpoint_files import read_record, verify
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.controller import Hooks, Plan, TrainerController
from draftworks.training.history import History, StepListener, TrainingObserver
from draftworks.training.optimizer import BF16Optimizer, LrSchedule, TrainerCore
from draftworks.training.resume import Checkpointer, TrainingProgress, read_resume_state
from draftworks.training.snapshot import WEIGHTS

log = logging.getLogger(__name__)


def compile_blocks(
    strategy: DraftStrategy, device: torch.device, backend: str | Callable[..., Any] = "inductor"
) -> bool:
    """Compile the forward of each block in place, before FSDP wraps them; names and weights are unchanged.

    Where the device has no compiler (C++ for a CPU, Triton for a GPU), or torch's gives wrong gradients, log a warning and
    change nothing.

    Args:
        backend: of torch.compile.

    Returns:
        Whether the blocks are compiled.
    """
    problem = _problem(device, backend)
    if problem is not None:
        log.warning(
            "training.compile: torch.compile does not work here on %s, so the draft is trained without it: %s. Install a "
            "compiler (g++ for a CPU, triton for a GPU) or another torch, or set training.compile to false",
            device.type,
            problem,
        )
        return False
    for block in find_compilable_blocks(strategy):
        block.forward = _compiled_in_training(block.forward, compile_for_many_kinds(block.forward, backend=backend))
    return True


def find_compilable_blocks(strategy: DraftStrategy) -> Sequence[nn.Module]:
    """Return the strategy's FSDP blocks; where it has none (blocks not called as modules), their parts."""
    parts = (module for module in strategy.model.modules() if isinstance(module, (GatedMlp, RmsNorm)))
    return strategy.fsdp_blocks() or tuple(parts)


def _compiled_in_training(plain: Callable[..., Tensor], fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Use the compiled forward in training only: evaluations have many more shapes, each compiled anew."""

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return (fast if torch.is_grad_enabled() else plain)(*args, **kwargs)

    return forward


def _problem(device: torch.device, backend: str | Callable[..., Any]) -> str | None:
    """Return why a small block cannot be compiled and differentiated; None if it can."""
    try:
        norm, mlp = RmsNorm(8, 1e-6).to(device), GatedMlp(8, 8, torch.Generator().manual_seed(0)).to(device)
        plain, fast = (
            _find_gradient(block, device)
            for block in ((lambda x: mlp(norm(x))), torch.compile(lambda x: mlp(norm(x)), backend=backend))
        )
    except Exception as error:  # torch raises many types, and passes on those of compilers
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if not torch.allclose(plain, fast, rtol=1e-2, atol=1e-3):  # also of products in TF32
        return f"torch {torch.__version__} compiles a small block whose gradient is {fast.norm():.4g}, not {plain.norm():.4g}"
    return None


def _find_gradient(block: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    x = torch.linspace(-1, 1, 16).reshape(2, 8).to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(block(x).square().sum(), x)
    return gradient


@dataclass(frozen=True)
class Persistence:
    """How a training survives its process.

    Attributes:
        manager: writes and finds the checkpoints.
        identity: what decides the training's result, as JSON: only a checkpoint of the same identity can be resumed.
        resume_from: the checkpoint to continue from; None starts at the beginning.
        resume_identity: identity of that checkpoint, where it is that of an earlier plan; see `find_resume_point`.
    """

    manager: CheckpointManager
    identity: Mapping[str, Any] = field(default_factory=dict)
    resume_from: Path | None = None
    resume_identity: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TrainedWeights:
    """A draft's whole state on the CPU of rank 0 (empty elsewhere), and its optimizer step."""

    tensors: Mapping[str, Tensor]
    step: int


class Trainer:
    """Composes loader, backend, optimizer, core and controller. Every rank of the process group builds one.

    Args:
        strategy: with its initial weights loaded; its model is wrapped in place.
        train_loader: from `FeatureDataLoader.for_training` or `for_packed_training`, whose schedule defines the
            optimizer step; or a `QueueDataLoader`, whose stream does.
        eval_loader: from `FeatureDataLoader.for_evaluation` or `for_packed_evaluation`.
        device: the device of this rank.
        persistence: None saves nothing and tracks no best.
        stop_signal, steps, discards: see `Hooks`.
        evaluates_start: whether the initial weights may be the best; False for random initial weights.

    Raises:
        ConfigError: the training is in arrival order and has no `max_steps`.
        StoreError: `resume_from` is no checkpoint of this training, or a damaged one.
    """

    def __init__(
        self,
        strategy: DraftStrategy,
        train_loader: TrainingLoader,
        eval_loader: FeatureDataLoader,
        training: TrainingSpec,
        device: torch.device,
        observers: Sequence[TrainingObserver] = (),
        persistence: Persistence | None = None,
        stop_signal: Callable[[], int] = lambda: 0,
        evaluates_start: bool = False,
        steps: StepListener | None = None,
        discards: Callable[[int], bool] | None = None,
    ) -> None:
        order = train_loader.order
        plan = make_plan(training, order.steps_per_epoch, evaluates_start)
        position = TrainingProgress(order.samples, order.global_batch_size, left_out=order.left_out)
        self.strategy = strategy
        strategy.reads_samples_again = plan.total_steps > plan.steps_per_epoch
        self.persistence = persistence
        self._publish_best = training.publish == "best"
        resumed = None
        if persistence is not None and persistence.resume_from is not None:
            resumed = read_resume_state(
                persistence.resume_from, persistence.resume_identity or persistence.identity, position
            )
            persistence.manager.resume(resumed.folder, resumed.position.global_step)
            resumed.load_weights(strategy.model)
        if training.compile:
            compile_blocks(strategy, device)
        self.backend = make_backend(training, device)
        self.backend.prepare_model(strategy)
        optimizer = make_optimizer(training, plan, self.backend)
        self.core = TrainerCore(strategy, self.backend, optimizer)
        checkpointer = None
        if persistence is not None:
            checkpointer = Checkpointer(persistence.manager, self.backend, optimizer, persistence.identity)
        hooks = Hooks(self._evaluate, stop_signal, observers, steps, discards)
        train_loader.prepare_for(device)
        eval_loader.prepare_for(device)
        self.controller = TrainerController(self.core, train_loader, plan, position, hooks, checkpointer)
        self._eval_loader = eval_loader
        self._stop_signal = stop_signal
        self._evaluator = Evaluator(device)
        self._forward = self.strategy.forward_loss
        if training.best_metric in (BLOCK_METRIC, WALK_METRIC):
            self._forward = forward_with_replay(strategy, strategy.draft_tokens)
        if resumed is not None:
            resumed.restore(optimizer, device)
            self.controller.restore(resumed)

    def can_evaluate(self) -> bool:
        """Whether the held-out set has a supervised token, to be checked before training. A collective.

        Goes batch by batch, so normally it costs one forward pass.

        Raises:
            ConfigError: the metric that decides which draft is the best does not exist.
        """
        for batch in self._eval_loader:
            found = self._evaluator.run(self._forward, [batch])
            if found is not None:
                if self.persistence is not None:
                    self.persistence.manager.rule.score(found.metrics())
                return True
        return False

    def fit(self) -> History:
        """Train to the end and evaluate; `controller.stopped_by` tells if a signal ended it early. A collective."""
        return self.controller.fit()

    def weights(self) -> dict[str, Tensor]:
        """Return the whole current state of the draft on the CPU of rank 0, empty on the others. A collective."""
        return self.backend.full_state_dict()

    def trained_weights(self) -> TrainedWeights:
        """Return the result of the training: the best evaluated draft, or the last if so configured. A collective.

        Raises:
            StoreError: the weights of the best were altered on disk since they were saved.
        """
        manager = None if self.persistence is None else self.persistence.manager
        best = None if manager is None else manager.best
        folder = None if manager is None else manager.best_dir()
        if not self._publish_best or best is None or folder is None or best.step == self.controller.global_step:
            return TrainedWeights(self.weights(), self.controller.global_step)
        if get_rank() != 0:
            return TrainedWeights({}, best.step)
        verify(folder, read_record(folder), [WEIGHTS])
        return TrainedWeights(read_weights(folder / WEIGHTS), best.step)

    def _evaluate(self, ctx: StepContext) -> EvalResult | None:
        return self._evaluator.run(self._forward, self._eval_loader, ctx, self._stop_signal)


def make_plan(training: TrainingSpec, steps_per_epoch: int | None, evaluates_start: bool = False) -> Plan:
    """Return the plan of a training spec.

    Args:
        steps_per_epoch: None for a stream in arrival order: it has `max_steps`, or fewer if it ends before.

    Raises:
        ConfigError: `max_steps` is missing where the data does not say how long the training is.
    """
    if steps_per_epoch is not None:
        total_steps = training.count_steps(steps_per_epoch)
    elif training.max_steps is not None:
        total_steps = training.max_steps
    else:
        raise ConfigError(
            "training.max_steps: expected the number of optimizer steps, found none. A training in arrival order needs "
            "it, because the length of its stream is not known: the learning rate follows it"
        )
    return Plan(
        total_steps,
        steps_per_epoch or total_steps,
        may_end=steps_per_epoch is None,
        log_every=training.log_every,
        eval_every=training.eval_every,
        save_every=training.save_every,
        patience=training.patience,
        evaluates_start=evaluates_start,
    )


def make_backend(training: TrainingSpec, device: torch.device) -> TrainingBackend:
    """Return FSDP's backend in a process group, else that of a single process, which computes in fp32 only."""
    if not dist.is_initialized():
        if training.compute_dtype != "float32":
            raise RuntimeError(f"compute_dtype {training.compute_dtype} needs a process group, if only of one rank")
        return SingleTrainingBackend(device)
    from draftworks.training.fsdp_backend import FSDPTrainingBackend  # seconds of imports: DTensor, sympy, checkpoints

    return FSDPTrainingBackend(
        device,
        getattr(torch, training.compute_dtype),
        get_local_world_size() if training.shard_within == "node" else None,
    )


def make_optimizer(training: TrainingSpec, plan: Plan, backend: TrainingBackend) -> BF16Optimizer:
    """Return the optimizer and schedule of a training spec."""
    schedule = LrSchedule(
        training.lr,
        plan.total_steps,
        training.schedule,
        warmup_ratio=training.warmup_ratio,
        decay_ratio=training.decay_ratio,
        floor=training.min_lr_ratio,
    )
    return BF16Optimizer(
        backend.parameters(), schedule, weight_decay=training.weight_decay, max_grad_norm=training.max_grad_norm
    )
