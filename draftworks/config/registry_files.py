"""Models of the files in `registry/`: targets, data sets and eval sets; see `deployment` for the rest. Torch-free.

Every model refuses unknown keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import DistinctNames, Dtype, Spec
from draftworks.config.capture import CaptureSpec
from draftworks.config.data import MixSpec, ResponseSpec, ServedSpec
from draftworks.config.decoding import LoopSpec
from draftworks.config.exports import ExportSettings
from draftworks.config.features import StreamingSpec, StreamSteps, count_steps
from draftworks.config.observation import (
    ObservationSpec,
    ObservedServerSpec,
    check_requests,
    check_servers,
    list_observed_strategies,
)
from draftworks.config.operations import (
    DecisionSpec,
    parse_cron,
    require_timezone,
)
from draftworks.config.service import ComparisonSpec, DataSpec, GateSpec, ServiceSpec, ServingSpec
from draftworks.config.trackers import TrackersSpec
from draftworks.config.urls import is_url, parse_dataset_url
from draftworks.storage.names import require_name

COMMIT = re.compile(r"[0-9a-f]{40}")
INTERVALS_REVISION = 2
"""Of how confidence intervals are computed: reports have them. 1, which named itself nowhere, was percentiles."""


class TrainingSpec(Spec):
    """Hyper-parameters of a draft's training; the defaults are the reference's where it has one."""

    processes: int = Field(default=1, ge=1, description="torchrun ranks.")
    global_batch_size: int = Field(default=8, ge=1, description="Samples per optimizer step over all ranks.")
    micro_batch_size: int = Field(
        default=1, ge=1, description="Samples per forward pass of one rank, padded to the longest."
    )
    pack_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Instead of that, samples one after the other in rows of at most so many tokens, nothing padded: a "
        "row per forward pass. Changes what a step costs, not what it learns.",
    )
    pack_overlong: Literal["refuse", "own_row"] = Field(
        default="refuse", description="Samples longer than pack_tokens end the run, or get a longer row each."
    )
    epochs: float = Field(default=1.0, gt=0, description="Passes over the data; a share of one is allowed.")
    max_steps: int | None = Field(
        default=None,
        ge=0,
        description="Upper limit of optimizer steps, beside `epochs`; 0 publishes the draft without training.",
    )
    lr: float = Field(default=1e-4, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="After warm-up. wsd: stable, then linear decay over the last `decay_ratio` of the steps.",
    )
    warmup_ratio: float = Field(default=0.015, ge=0, lt=1, description="Share of the steps with linear warm-up.")
    decay_ratio: float = Field(default=0.2, gt=0, le=1, description="Share of the steps with decay, for schedule wsd.")
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the end of the schedule, as a share of lr."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of AdamW.")
    max_grad_norm: float = Field(default=0.5, gt=0, description="Gradients are clipped to this norm.")
    compute_dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of forward and backward; master weights are always fp32. Left out, it is chosen as for `capture`.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if there is one.")
    compile: bool = Field(
        default=False, description="torch.compile the draft's blocks: a slow start, shorter steps on a GPU."
    )
    shard_within: Literal["job", "node"] = Field(
        default="job",
        description="Ranks that share one copy of weights and optimizer: all of the job, or those of a node, with a copy on "
        "each (HSDP): less traffic between nodes, more memory. The draft is the same to rounding.",
    )
    seed: int = Field(default=42, description="Seed of initial weights and sample order.")
    log_every: int = Field(default=10, ge=1, description="Optimizer steps between progress reports.")
    eval_every: int = Field(default=0, ge=0, description="Optimizer steps between evaluations; 0 = only at the end.")
    publish: Literal["best", "last"] = Field(
        default="best",
        description="Which of the evaluated drafts becomes the result: the best by `best_metric`, or the last.",
    )
    best_metric: str = Field(
        default="eval/simulated_acc_len",
        description="Metric of an evaluation by which the best draft is chosen; eval/rung3_walk_acc_len replays greedy serving.",
    )
    best_mode: Literal["max", "min"] = Field(default="max", description="min for a metric like eval/avg_loss.")
    best_min_delta: float = Field(
        default=0.0, ge=0, description="A draft counts as better only if it is better by more than this."
    )
    patience: int = Field(
        default=0, ge=0, description="Training ends after this number of evaluations without a better draft; 0 = never."
    )
    save_every: int = Field(
        default=200, ge=0, description="Optimizer steps between checkpoints; 0 = only the best and the last."
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="Number of the newest checkpoints to keep, beside the best."
    )
    save_async: bool = Field(
        default=False, description="Write checkpoints while training goes on, from a copy of the state."
    )
    tensorboard: bool = Field(default=False, description="Also write TensorBoard event files beside the draft.")
    trackers: TrackersSpec = Field(default_factory=TrackersSpec, description="Services that show its curves as well.")

    def count_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of this training, see `count_steps`."""
        return count_steps(self.epochs, self.max_steps, steps_per_epoch)

    def make_stream_steps(self, samples: int) -> StreamSteps:
        """Return what decides the order of this training's samples where features stream."""
        own = {name: getattr(self, name) for name in ("global_batch_size", "seed", "epochs", "max_steps")}
        return StreamSteps(total_steps=self.count_steps(samples // self.global_batch_size), **own)

    @model_validator(mode="after")
    def _check_batch(self) -> TrainingSpec:
        if self.pack_tokens is not None:
            return self
        share = self.micro_batch_size * self.processes
        if self.global_batch_size % share:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
                f" x processes {self.processes} = {share}"
            )
        return self

    @model_validator(mode="after")
    def _check_packing(self) -> TrainingSpec:
        if self.pack_tokens is not None and self.global_batch_size < self.processes:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} leaves some of {self.processes} processes without a sample"
            )
        if self.pack_tokens is None and self.pack_overlong != "refuse":
            raise ValueError(
                f"pack_overlong {self.pack_overlong} has no effect without pack_tokens: set pack_tokens too"
            )
        return self

    @model_validator(mode="after")
    def _check_patience(self) -> TrainingSpec:
        if self.patience and not self.eval_every:
            raise ValueError(f"patience {self.patience} counts evaluations, but eval_every is 0: set eval_every too")
        return self

    def to_identity(self, batch_means: bool = False) -> dict[str, Any]:
        """Return the options that determine the weights. The interval of evaluations is one: the best evaluated draft is
        the result. How the global batch is divided, and how often checkpoints are saved, is not.

        Args:
            batch_means: whether the loss is made of means over micro-batches. Then their size is an option too; the number
                of processes is still none, as they share the same micro-batches.
        """
        cut = {"processes", "micro_batch_size", "pack_tokens", "pack_overlong"} - (
            {"micro_batch_size"} if batch_means else set()
        )
        kept = {"save_every", "keep_checkpoints", "save_async"}
        return self.model_dump(
            exclude=cut | kept | {"device", "compile", "log_every", "tensorboard", "trackers", "shard_within"}
        )


class EvaluationSpec(Spec):
    """How the target's drafts are measured, and the schedule on which they are measured again."""

    cron: str | None = Field(
        default=None,
        description="Schedule on which drafts are measured again, as minute hour day month weekday; None = no schedule.",
    )
    cron_timezone: str = Field(default="UTC", description="Time zone of `cron`: an IANA name such as Europe/Berlin.")
    draft_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Proposals per pass, at most what a draft can make; default what it was trained for.",
    )
    loop: LoopSpec = Field(default_factory=LoopSpec)
    serving: ServingSpec = Field(default_factory=ServingSpec)
    confidence: float = Field(
        default=0.95, gt=0, lt=1, description="Level of confidence intervals, whose observations are prompts."
    )
    resamples: int = Field(default=2000, ge=100, description="Number of bootstrap resamples.")
    slices: DistinctNames = Field(
        default=["length"],
        description="Columns of the eval data by which acceptance is reported separately; length is in tokens.",
    )

    @field_validator("cron")
    @classmethod
    def _check_cron(cls, value: str | None) -> str | None:
        return None if value is None else parse_cron(value)

    @field_validator("cron_timezone")
    @classmethod
    def _check_timezone(cls, value: str) -> str:
        return require_timezone(value)

    def to_identity(self, strategies: Iterable[str] = ()) -> dict[str, Any]:
        """Return the options that determine the figures of reports on these strategies' drafts; without any, the greedy ones."""
        decided = self.model_dump(include={"draft_tokens", "confidence", "resamples", "slices"})
        return {**decided, "loop": self.loop.to_identity(strategies), "intervals": INTERVALS_REVISION}


class StrategyEntry(Spec):
    """One draft of a target: the strategy's own options (checked by the strategy) and training overrides."""

    options: dict[str, Any] = Field(default_factory=dict)
    training: TrainingSpec = Field(default_factory=TrainingSpec)
    start_from: str | None = Field(
        default=None,
        description="Folder of a draft to begin from, relative to the registry; `draftworks import` makes one of a peer's "
        "checkpoint. With training.max_steps 0 it is measured as it is.",
    )
    export: ExportSettings = Field(default_factory=ExportSettings)


class TargetSpec(Spec):
    """A large language model to train drafts for: one file `registry/targets/NAME.yaml`, one Dagster partition."""

    name: str
    description: str = Field(default="", description="Free text, shown to users only.")
    model: str = Field(
        min_length=1, description="A directory or a GGUF file, relative to the registry, or a Hugging Face hub id."
    )
    revision: str | None = Field(
        default=None, description="Commit (40 hex digits) of the hub id; not for a directory or file."
    )
    tokenizer: str | None = Field(
        default=None, description="Directory or hub id of the tokenizer, if it is not in `model`."
    )
    tokenizer_revision: str | None = Field(default=None, description="Commit of a hub tokenizer.")
    chat_template: str | None = Field(
        default=None, description="A Jinja file, relative to the registry, instead of the tokenizer's."
    )
    dataset: str = Field(description="Name of an entry in registry/datasets/.")
    mix: MixSpec | None = Field(
        default=None,
        description="More data sets beside `dataset`, weights and shares of slices; null: `dataset` alone.",
    )
    max_length: int = Field(
        default=2048,
        gt=2,
        description="Tokens per sample; longer ones are cut or rejected, never silently. Left out, it is at most the model's "
        "context.",
    )
    data: DataSpec = Field(default_factory=DataSpec)
    responses: ResponseSpec = Field(default_factory=ResponseSpec)
    capture: CaptureSpec = Field(default_factory=CaptureSpec)
    streaming: StreamingSpec | None = Field(
        default=None,
        description="Features of the training samples stream from producers to the trainer; null: all are stored before. "
        "The drafts are the same.",
    )
    launcher: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the deployment's `launcher` section that differ for this target's jobs, merged key by key.",
    )
    evals: DistinctNames = Field(
        default_factory=list, description="Entries of registry/evals/ to measure on, beside heldout."
    )
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    gates: GateSpec = Field(default_factory=GateSpec)
    comparison: ComparisonSpec = Field(default_factory=ComparisonSpec)
    service: ServiceSpec | None = Field(default=None, description="Puts drafts into service by a rule; null: no asset.")
    decision: DecisionSpec | None = Field(default=None, description="When the draft in service is trained again.")
    servers: list[ObservedServerSpec] = Field(
        default_factory=list, description="Servers in production, whose counters `draftworks observe` reads."
    )
    observation: ObservationSpec = Field(default_factory=ObservationSpec)
    strategies: dict[str, StrategyEntry] = Field(default_factory=lambda: {"eagle3": StrategyEntry()})

    @field_validator("name", "dataset")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return require_name(value)

    @property
    def is_hub(self) -> bool:
        return self.revision is not None

    @model_validator(mode="after")
    def _check_arrival(self) -> TargetSpec:
        until = None if self.streaming is None else self.streaming.until
        if until is None:
            return self
        if self.mix is not None:
            raise ValueError("mix: a training in arrival order takes the rows of one source: leave mix out")
        if self.responses.endpoint is not None:
            raise ValueError("responses.endpoint: in arrival order the engine of capture answers: leave endpoint out")
        for name, entry in self.strategies.items():
            where, training = f"strategies.{name}.training", entry.training
            if training.epochs != 1.0:
                raise ValueError(
                    f"{where}.epochs: in arrival order each sample is trained once, and its features are freed: expected 1, "
                    f"found {training.epochs:g}"
                )
            if training.max_steps is not None:
                raise ValueError(f"{where}.max_steps: streaming.until says where a training in arrival order ends")
            until.count_steps(training.global_batch_size)
        return self

    @property
    def arrives(self) -> bool:
        """Whether its drafts are trained in arrival order."""
        return self.streaming is not None and self.streaming.arrives

    @model_validator(mode="after")
    def _check_mix(self) -> TargetSpec:
        if self.mix is not None:
            self.mix.require_effect(self.dataset, self.data.max_conversations)
            self.mix.require_answers(self.responses)
        return self

    @property
    def asks_both_ways(self) -> bool:
        """Whether prompts are asked with thinking on and off: shares of the training part, all others both ways."""
        return self.mix is not None and self.mix.asks_both_ways

    @property
    def training_datasets(self) -> list[str]:
        """Names of the data sets that are trained on."""
        return [self.dataset, *([] if self.mix is None else self.mix.datasets)]

    @model_validator(mode="after")
    def _check_service(self) -> TargetSpec:
        if self.service is not None:
            self.service.require_eval_sets(["heldout", *self.evals])
            self.service.require_strategies(self.strategies)
        elif self.decision is not None:
            raise ValueError(
                "decision: is about the draft in service: add a `service` section too, {} for its defaults"
            )
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> TargetSpec:
        check_servers(self.servers, self.strategies)
        check_requests(self.observation.requests, self.strategies, self.evals)
        return self

    @property
    def observed_strategies(self) -> list[str]:
        """Strategies whose drafts are observed in production."""
        return list_observed_strategies(self.servers, self.observation.requests, list(self.strategies))

    @model_validator(mode="after")
    def _check_commits(self) -> TargetSpec:
        for what, commit in (("revision", self.revision), ("tokenizer_revision", self.tokenizer_revision)):
            if commit is not None and not COMMIT.fullmatch(commit):
                raise ValueError(
                    f"{what} must be a commit of 40 hex digits, found {commit!r}: branches and tags can change"
                )
        return self


class DatasetSpec(Spec):
    """A source of conversations: one file `registry/datasets/NAME.yaml`."""

    name: str
    description: str = Field(default="", description="Free text, shown to users only.")
    files: list[str] = Field(
        min_length=1,
        description="JSONL, JSON or Parquet, relative to the registry, or at s3://bucket/… or "
        "hf://datasets/org/name@commit/…; globs allowed.",
    )
    format: Literal["auto", "sharegpt", "openai", "tokens", "served"] = Field(
        default="auto",
        description="served: requests as servers and gateways log them, one per line; read by choice only.",
    )
    licence: str = ""
    served: ServedSpec | None = Field(
        default=None, description="How served prompts are redacted, for format served; default: its defaults."
    )

    @model_validator(mode="after")
    def _check_served(self) -> DatasetSpec:
        if self.served is not None and self.format != "served":
            raise ValueError(f"served has no effect on format {self.format}: set format to served, or leave it out")
        return self

    @field_validator("files")
    @classmethod
    def _check_urls(cls, value: list[str]) -> list[str]:
        for each in filter(is_url, value):
            parse_dataset_url(each)
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return require_name(value)


class EvalSpec(Spec):
    """A named eval set: one file `registry/evals/NAME.yaml`. Targets that list it are measured on it beside `heldout`."""

    name: str
    description: str = Field(default="", description="Free text, shown to users only.")
    dataset: str = Field(
        description="Name of an entry in registry/datasets/; all of it is evaluated, nothing trained on."
    )
    max_conversations: int | None = Field(
        default=None, gt=0, description="Number of conversations to use, chosen by hash; None = all."
    )
    part: Literal["all", "held_out"] = Field(
        default="all",
        description="held_out: only the share data.held_out_share of each target, which it never trains on: for a data set "
        "that is trained on too.",
    )

    @field_validator("name", "dataset")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return require_name(value)
