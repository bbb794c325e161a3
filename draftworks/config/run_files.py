"""Run files: the input of a program in `draftworks.programs`, as one YAML file. Torch-free.

A Dagster asset writes one and launches the program on it; a person can write the same file and start the same program
by hand. Paths are absolute, or relative to the folder of the run file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from draftworks.config.base import Spec, SpecType
from draftworks.config.capture import CaptureSpec, FeatureStorage, SGLangSpec, VLLMSpec
from draftworks.config.data import AnswersSampling
from draftworks.config.exports import ExportSettings
from draftworks.config.features import ObjectFeaturesSpec, StoreKind, StreamFollower, StreamingSpec, StreamSteps
from draftworks.config.registry_files import DatasetSpec, EvaluationSpec, ResponseSpec, TrainingSpec
from draftworks.config.service import DataSpec, ServingEngine, ServingSpec
from draftworks.config.strict_yaml import load_yaml
from draftworks.storage.names import require_name

TOKENS_FOLDER = "tokens"
"""The tokenized set in the folder of a `responses` result."""
EVAL_PART = "all"
"""The one part of a named eval set's conversations."""
VOCAB_FILE = "vocab.safetensors"
"""The mapping in the folder of a `vocab_mapping` result, and of a draft that was trained with it."""


COPY_VARIABLE = "DRAFTWORKS_COPY"
"""Environment variable of a job of which a scheduler runs several copies: the number of this one, from 0."""
WORKER_FIGURES = "figures.json"
"""In `out` of a job that takes parts of another's work: numbers to be added to those of the other's report."""
CHECKPOINTS_FOLDER = "checkpoints"
TRACKERS_FOLDER = "trackers"
"""What a training wrote for its trackers: in no manifest, as `wandb sync` writes there too."""
"""A training's checkpoints in the folder of its draft."""


class TargetFiles(Spec):
    """A resolved target: locations, digests and shape of its model and tokenizer."""

    name: str
    model: str = Field(description="Directory or hub id.")
    revision: str | None = None
    tokenizer: str = Field(description="Directory or hub id.")
    tokenizer_revision: str | None = None
    chat_template: str | None = Field(
        default=None, description="Path of a Jinja file that replaces the tokenizer's template."
    )
    digest: str = Field(description="Content digest of the weights, or of hub id and commit.")
    tokenizer_digest: str = Field(description="Content digest of tokenizer files and chat template.")
    num_layers: int
    hidden_size: int
    vocab_size: int
    context: int = Field(description="Longest sequence the model takes.")
    num_heads: int | None = Field(default=None, description="Number of attention heads in the target's config.")
    digests: Path | None = Field(
        default=None,
        description="File of remembered digests, so that a program need not read large files to know them.",
    )


class StoreSpec(Spec):
    """A feature store in a run file; a bare path means a local store."""

    kind: StoreKind | Literal["mooncake"] = "local"
    root: Path = Field(
        description="Folder of the store; of kind mooncake that of its service, with the address file; of kind s3 that of "
        "the notes of captures that are under way."
    )
    objects: ObjectFeaturesSpec | None = Field(default=None, description="s3: where the features are.")
    timeout_s: float = Field(
        default=120.0, gt=0, description="mooncake: how long a store that does not run, or was lost, is waited for."
    )
    put_timeout_s: float = Field(default=1800.0, ge=0, description="mooncake: how long a full store is waited for.")

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_path(cls, value: Any) -> Any:
        return {"root": value} if isinstance(value, (str, Path)) else value

    @model_validator(mode="after")
    def _check_objects(self) -> StoreSpec:
        if (self.kind == "s3") != (self.objects is not None):
            raise ValueError("kind s3 needs objects with a url, and no other kind has them")
        return self


class RunFile(Spec):
    """Base of all run files. `out` is the output folder: it must exist, and be empty or hold an interrupted run's files."""

    out: Path

    @classmethod
    def load(cls: type[SpecType], path: Path) -> SpecType:
        """Read and validate a run file; its relative paths are resolved against its own folder."""
        return _resolve_paths(load_yaml(path, cls), path.resolve().parent)

    @property
    def longest_wait_s(self) -> float:
        """Longest time in seconds for which the program may wait for a server or a producer without being stalled."""
        capture = getattr(self, "capture", None)
        names = ("sglang", "vllm") if capture is None else (capture.software,)
        engines = [found for name in names if name and (found := getattr(self, name, None)) is not None]
        endpoint = getattr(getattr(self, "responses", None), "endpoint", None)
        waits = [0.0, *(wait for each in engines for wait in (each.start_timeout_s, each.request_timeout_s))]
        stream = getattr(self, "stream", None)
        waits += [] if stream is None else [stream.settings.timeout_s]
        return max(waits if endpoint is None else [*waits, endpoint.timeout_s])

    @property
    def gpus_per_process(self) -> int:
        """GPUs that each process of the program uses, on a machine that has any; more than one for an engine that it starts."""
        capture, serving = getattr(self, "capture", None), getattr(self, "serving", None)
        if serving is not None:
            return serving.server.gpus
        answers_come_from_elsewhere = getattr(getattr(self, "responses", None), "endpoint", None) is not None
        return 1 if capture is None or answers_come_from_elsewhere else capture.gpus_per_process

    def save(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))
        return path


class TargetRun(RunFile):
    """Base of run files with a target; the programs start only if the target's files still have the recorded digests."""

    target: TargetFiles


class SharedRun(TargetRun):
    """Base of run files whose work several jobs may share. Jobs with the same work and another number take parts of it."""

    worker: int = Field(
        default=0,
        ge=0,
        description="Number of this job among those that share the work. Job 0 makes the result; the others need an `out` of "
        "their own, and write only their figures there.",
    )

    def of_copy(self, copy: int) -> Self:
        """Return the run file of one of several like jobs that were started with this one: number and `out` are its own."""
        worker = self.worker + copy
        return self.model_copy(update={"worker": worker, "out": self.out / str(worker)})


class RegenerateRun(SharedRun):
    """Generate the target's answers to conversations: writes the sets `out/conversations` and `out/tokens`."""

    conversations: Path = Field(description="Folder of a conversations set.")
    workers: int = Field(
        default=1,
        ge=1,
        description="Jobs that share the work; with more than one, windows of conversations are shared.",
    )
    answers: Path = Field(
        description="Folder of finished answers, kept across runs: only new conversations are answered."
    )
    earlier_answers: list[Path] = Field(
        default=[], description="Files of answers kept elsewhere; those of this run's kind are taken over."
    )
    responses: ResponseSpec
    only_last_turn: bool = False
    max_rejected_share: float = Field(
        default=0.05, ge=0, le=1, description="Share of conversations without a response above which the run stops."
    )
    max_length: int
    capture: CaptureSpec = Field(description="The engine that runs the target, unless `responses` names an endpoint.")
    sglang: SGLangSpec = Field(default_factory=SGLangSpec)
    vllm: VLLMSpec = Field(default_factory=VLLMSpec)


class MeasureRun(RegenerateRun):
    """Answer a few conversations and capture the answers, for a plan: writes lengths and speeds to `record`."""

    taps: list[int] = Field(description="hf_index of every tap, ascending.")
    limit_s: float = Field(
        default=60.0, gt=0, description="Seconds for answers; captures take a quarter of it at most."
    )
    prompt_tokens: float = Field(default=0.0, ge=0, description="Estimated tokens that a conversation asks with.")
    record: Path = Field(description="File that the figures are written to.")
    identity: dict[str, Any] = Field(description="What decides the figures; kept with them.")


class CaptureRun(SharedRun):
    """Capture hidden states of a tokenized set into the feature store: writes refs.jsonl and manifest.json into `out`."""

    tokens: Path = Field(description="Folder of a tokenized set.")
    taps: list[int] = Field(description="hf_index of every tap, ascending; `last` is always captured too.")
    capture: CaptureSpec
    store: StoreSpec
    sglang: SGLangSpec = Field(default_factory=SGLangSpec)
    vllm: VLLMSpec = Field(default_factory=VLLMSpec)


class StreamPlace(Spec):
    """Where the trainers and the producers of one stream meet."""

    database: Path | None = Field(
        default=None, description="SQLite file of the control plane, on a local disk of this machine; null: `control`."
    )
    control: str | None = Field(
        default=None, description="host:port of the control server that owns the database; its clients never open it."
    )
    token_file: Path | None = Field(
        default=None, description="File with the control server's secret; null: DRAFTWORKS_CONTROL_TOKEN has it."
    )
    store: StoreSpec = Field(description="The store that producers fill and the trainer reads and frees.")
    run_id: str = Field(default="draft", description="Name of the training in the database.")
    settings: StreamingSpec = Field(default_factory=StreamingSpec)
    consumer: str = Field(default="trainer", description="Name of this training in the database.")
    followers: list[StreamFollower] = Field(
        default=[], description="All trainings that follow the stream, this one included; empty if it is the only one."
    )
    max_failed_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of samples without valid features above which the training ends."
    )

    @model_validator(mode="after")
    def _check_control_plane(self) -> StreamPlace:
        if (self.database is None) == (self.control is None):
            raise ValueError("a stream has one control plane: expected either database or control")
        return self


class ArrivalSource(Spec):
    """Where the samples of a training in arrival order come from, and how they become tokens."""

    rows: Path = Field(description="Folder that the rows are written down in as they come.")
    root: Path = Field(description="The registry's folder, which the files of `dataset` are relative to.")
    dataset: DatasetSpec | None = Field(default=None, description="The data set whose files grow; null: `iterator`.")
    iterator: str | None = Field(default=None, description="Entry point of the group draftworks.sources.")
    responses: ResponseSpec
    data: DataSpec
    max_length: int = Field(gt=2, description="Token limit of a sample.")

    @model_validator(mode="after")
    def _check_one(self) -> ArrivalSource:
        if (self.dataset is None) == (self.iterator is None):
            raise ValueError("a source is either a data set or an iterator")
        return self


class ProduceRun(TargetRun):
    """Capture features in the order in which a streamed training uses them, until it has done its last step.

    Each producer writes its figures into `out`.
    """

    tokens: Path = Field(description="Folder of the tokenized set.")
    features: Path = Field(description="Folder of the planned feature set.")
    streams: list[str] = Field(description="Names of the streams that the training reads, such as hf2 or last.")
    capture: CaptureSpec
    sglang: SGLangSpec = Field(default_factory=SGLangSpec)
    vllm: VLLMSpec = Field(default_factory=VLLMSpec)
    steps: StreamSteps
    stream: StreamPlace
    source: ArrivalSource | None = Field(
        default=None, description="Samples in arrival order; null: those of `features`, in planned order."
    )
    worker: str = Field(default="producer", description="Name of this producer among those of the training.")

    @property
    def taps(self) -> list[int]:
        """hf_index of the streams that are taps, ascending."""
        return sorted(int(name.removeprefix("hf")) for name in self.streams if name != "last")

    def as_capture(self) -> CaptureRun:
        """Return the settings of its captures."""
        return CaptureRun(
            out=self.out,
            target=self.target,
            tokens=self.tokens,
            taps=self.taps,
            capture=self.capture,
            store=self.stream.store,
            sglang=self.sglang,
            vllm=self.vllm,
        )


class MemoryRun(RunFile):
    """Keep the memory of a stream's Mooncake store, as large as the stream needs it; logs and address are in its root."""

    features: Path = Field(description="Folder of the planned feature set.")
    streams: list[str] = Field(description="Names of the streams that the trainings read.")
    steps: StreamSteps
    stream: StreamPlace


class FeatureSet(Spec):
    """A tokenized set together with its captured features."""

    tokens: Path
    features: Path = Field(description="Folder with refs.jsonl and manifest.json.")
    read_as: FeatureStorage = Field(
        default="plain", description="Round plain features when they are read, as if they had been stored so."
    )


class TrainRun(TargetRun):
    """Train one draft: writes model.safetensors, config.json and history.json into `out`, checkpoints into `out/checkpoints`.

    Where `out` has a checkpoint of this run, the training goes on from the newest.
    """

    strategy: str
    options: dict[str, Any]
    training: TrainingSpec
    train: FeatureSet
    heldout: FeatureSet
    store: StoreSpec
    stream: StreamPlace | None = Field(
        default=None, description="Producers fill the store of the training features meanwhile; None: they are stored."
    )
    vocab_mapping: Path | None = Field(
        default=None, description="File of the reduced vocabulary, where the strategy has one."
    )
    run_id: str = Field(
        default="draft", description="Name of the training among others with the same checkpoints folder."
    )
    resume_from: Path | None = Field(default=None, description="A checkpoint to begin from, where `out` has none yet.")
    start_from: Path | None = Field(
        default=None, description="Folder of a draft whose weights the first step begins with."
    )

    @field_validator("run_id")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return require_name(value)

    @property
    def checkpoints(self) -> Path:
        return self.out / CHECKPOINTS_FOLDER


class EvaluateRun(TargetRun):
    """Measure a draft on an eval set, beside the same one untrained and what proposes without a model: writes report.json
    into `out`.
    """

    strategy: str
    options: dict[str, Any]
    draft: Path = Field(description="Folder of a trained draft.")
    train_tokens: Path = Field(description="Tokenized training set, for what proposes from its answers.")
    heldout: FeatureSet
    store: StoreSpec
    vocab_mapping: Path | None = Field(
        default=None, description="File of the reduced vocabulary, where the strategy has one."
    )
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    loop_cache: Path | None = Field(
        default=None,
        description="Folder of rung 4's measurements, shared by all drafts and targets; None measures every time.",
    )
    rival_cache: Path | None = Field(
        default=None,
        description="Folder of the walks of what proposes without a model, shared in the same way; None measures every time.",
    )
    eval_set: str = "heldout"
    greedy_answers: bool | None = Field(
        default=None, description="Whether this target wrote the eval set's answers, greedily; None: not known."
    )
    answers: AnswersSampling | None = Field(
        default=None, description="How this target wrote the eval set's answers; None: others did, or it is not known."
    )
    max_new_tokens: int = Field(default=512, gt=0, description="Token limit of the eval set's answers.")
    max_length: int | None = Field(
        default=None, gt=2, description="Token limit of its samples, prompt included; None = no limit."
    )
    micro_batch_size: int = Field(default=8, ge=1, description="Samples per forward pass of one rank.")
    device: str = "auto"
    seed: int = 42


class ExportRun(TargetRun):
    """Write a draft in the formats of servers: a folder for each in `out`."""

    draft: Path = Field(description="Folder of a trained draft.")
    export: ExportSettings = Field(default_factory=ExportSettings)
    card: Path | None = Field(default=None, description="File of the draft's model card, to go beside the weights.")
    heldout: FeatureSet | None = Field(
        default=None, description="What a quantised draft is walked over, beside the draft as it is; needed for one."
    )
    store: StoreSpec | None = Field(default=None, description="Where those features are.")
    draft_tokens: int | None = Field(
        default=None, ge=1, description="Tokens proposed per pass on that walk; default what the draft is trained for."
    )


class DraftServing(Spec):
    """An exported draft in a live server."""

    engine: ServingEngine = "sglang"
    url: str | None = Field(default=None, description="Address of a running server; null: one is started.")
    command: str = Field(
        description="The export's command line for this server; DRAFT_FOLDER in it stands for `draft`."
    )
    draft: Path = Field(description="Folder of the draft in a format that the engine loads.")
    decodings: list[str] = Field(
        default=[],
        description="What is sampled after the greedy answers, as metrics name it: t0.6_greedy_draft.",
    )


class ServeRun(TargetRun, DraftServing):
    """Load an exported draft in live servers and count what each accepts: writes serving.json into `out`."""

    others: list[DraftServing] = Field(default=[], description="Further servers, one after another.")
    tokens: Path = Field(description="Folder of the tokenized eval set.")
    report: Path = Field(description="Folder of the draft's report on it, for the walk to compare with.")
    draft_tokens: int = Field(ge=1, description="Proposals per pass of that walk.")
    serving: ServingSpec
    logs: Path = Field(description="Folder for the server's log.")
    sglang: SGLangSpec = Field(default_factory=SGLangSpec)
    vllm: VLLMSpec = Field(default_factory=VLLMSpec)
    max_new_tokens: int = Field(default=512, gt=0, description="Token limit of the eval set's answers.")
    max_length: int = Field(gt=2, description="Token limit of its samples, prompt included.")
    confidence: float = Field(
        default=0.95, gt=0, lt=1, description="Level of confidence intervals, whose observations are prompts."
    )
    resamples: int = Field(default=2000, ge=100, description="Number of bootstrap resamples.")

    def list_runs(self) -> list[ServeRun]:
        """Return the run of each server alone."""
        return [self.model_copy(update={**dict(one), "others": []}) for one in (self.as_serving(), *self.others)]

    def as_serving(self) -> DraftServing:
        return DraftServing(**{name: getattr(self, name) for name in DraftServing.model_fields})


def _resolve_paths(spec: SpecType, base: Path) -> SpecType:
    """Return the spec with every relative path, also in nested specs, resolved against `base`."""
    moved: dict[str, Any] = {}
    for name, value in spec:
        if isinstance(value, Path):
            moved[name] = base / value  # an absolute path stays as it is
        elif isinstance(value, Spec):
            moved[name] = _resolve_paths(value, base)
        elif isinstance(value, list) and all(isinstance(each, Path) for each in value):
            moved[name] = [base / each for each in value]
        elif isinstance(value, list) and all(isinstance(each, Spec) for each in value):
            moved[name] = [_resolve_paths(each, base) for each in value]
    return spec.model_copy(update=moved)
