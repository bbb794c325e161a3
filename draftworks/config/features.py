"""Where captured features are kept, object storage, and how they stream to a training. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import EnvironmentName, Spec
from draftworks.config.urls import parse_endpoint, parse_url
from draftworks.errors import ConfigError
from draftworks.storage.object_access import parse_object_url

StoreKind = Literal["local", "shared_dir", "s3"]


class FeaturesSpec(Spec):
    """Where captured features are kept."""

    kind: StoreKind = Field(
        default="local",
        description="local: shards, read by memory map. shared_dir: a file per feature, for several machines. s3: shards "
        "in object storage, for any number of machines; needs draftworks[s3].",
    )
    root: str | None = Field(
        default=None,
        description="Folder with a store for the weights of each target, relative to the registry; default "
        "feature_store in `var`. That of shared_dir has to be given, and to exist: it is what every machine mounts. s3 "
        "keeps only notes of captures that are under way there.",
    )
    url: str | None = Field(default=None, description="s3: s3://bucket/prefix with a store for each target's weights.")
    cache: str | None = Field(
        default=None,
        description="s3: folder of features that were read, relative to the registry; default feature_cache in `var`. A "
        "disk of each machine is faster.",
    )
    cache_gb: float = Field(
        default=20.0, ge=0, description="s3: size of that folder, for all processes together; 0: nothing is kept."
    )
    read_ahead_mb: int = Field(
        default=256, ge=0, description="s3: memory of each rank for features that are read before they are asked for."
    )
    requests: int = Field(default=16, ge=1, le=256, description="s3: samples that each rank reads at a time.")

    @model_validator(mode="after")
    def _check_place(self) -> FeaturesSpec:
        if self.kind == "shared_dir" and self.root is None:
            raise ValueError("kind shared_dir needs a root: the existing folder that every machine mounts")
        if (self.kind == "s3") != (self.url is not None):
            raise ValueError("kind s3 needs a url such as s3://bucket/prefix, and no other kind has one")
        if self.url is not None:
            parse_object_url(self.url)
        return self


class BucketAccess(Spec):
    """How a bucket is reached. Keys are read from the environment, and are never written anywhere."""

    endpoint: str | None = Field(
        default=None, description="Address of an S3-compatible server; default Amazon's, by `region`."
    )
    region: str | None = Field(default=None, description="Region of the bucket; default that of the environment.")
    access_key_env: EnvironmentName = Field(
        default="AWS_ACCESS_KEY_ID", description="Environment variable with the access key."
    )
    secret_key_env: EnvironmentName = Field(
        default="AWS_SECRET_ACCESS_KEY", description="Environment variable with the secret key."
    )
    session_token_env: EnvironmentName = Field(
        default="AWS_SESSION_TOKEN", description="Environment variable with the token of temporary keys, if any."
    )
    anonymous: bool = Field(default=False, description="Sign no request: a public bucket that is only read.")
    timeout_s: float = Field(default=60.0, gt=0, description="Time limit of one request.")
    retry_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a server that does not answer, or answers with its own error, is tried.",
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        return None if value is None else parse_url(value)


class ObjectStorageSpec(BucketAccess):
    """How buckets are reached: these keys for all of them, unless `buckets` has others for one."""

    buckets: dict[str, BucketAccess] = Field(
        default={}, description="Buckets that are reached in another way, by name."
    )

    def select(self, bucket: str) -> BucketAccess:
        """Return how one bucket is reached."""
        names = BucketAccess.model_fields
        return self.buckets.get(bucket) or BucketAccess(**{name: getattr(self, name) for name in names})


class ObjectFeaturesSpec(Spec):
    """The feature store of one target's weights in object storage, as a run file names it."""

    url: str = Field(description="s3://bucket/prefix of the store.")
    access: BucketAccess = Field(default_factory=BucketAccess)
    cache: Path | None = Field(default=None, description="Folder of features that were read; None: none are kept.")
    cache_gb: float = Field(default=20.0, ge=0, description="Size of that folder, for all processes together.")
    read_ahead_mb: int = Field(default=256, ge=0, description="Features that are read before they are asked for.")
    requests: int = Field(default=16, ge=1, le=256, description="Samples that one process reads at a time.")

    @model_validator(mode="after")
    def _check_url(self) -> ObjectFeaturesSpec:
        parse_object_url(self.url)
        return self


class PublishSpec(Spec):
    """Where exports and reports are published to."""

    url: str = Field(description="s3://bucket/prefix that every export and report is copied to.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        return parse_object_url(value).url


class WatermarkSpec(Spec):
    """How much producers may have captured that no optimizer step has used yet; null is no limit."""

    samples: int | None = Field(default=256, ge=1, description="Samples; at least one global batch.")
    bytes: int | None = Field(default=None, ge=1, description="Bytes; at least those of the largest step.")
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps.")

    @model_validator(mode="after")
    def _check_limit(self) -> WatermarkSpec:
        if self.samples is None and self.bytes is None and self.steps is None:
            raise ValueError("expected a limit of samples, bytes or steps, found none")
        return self


class ControlSpec(Spec):
    """A control server beside the training: producers and trainers of other hosts reach the control plane over it."""

    listen: str = Field(
        default="127.0.0.1:0",
        description="Its address and port on the host of the launcher; port 0 takes a free one. The secret is in the "
        "environment variable DRAFTWORKS_CONTROL_TOKEN, or else made for each training, in a file beside its database.",
    )

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        return parse_endpoint(value)


class StreamStoreSpec(Spec):
    """Where the features of a stream are between their capture and their last use."""

    kind: Literal["shared_dir", "mooncake"] = Field(
        default="shared_dir",
        description="shared_dir: files below `var`. mooncake: memory of the launcher's host, as much as the stream holds at "
        "most; its processes run beside the training, and need draftworks[mooncake] in the Python that runs Dagster.",
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="mooncake: address of the launcher's host at which producers and trainers reach the memory.",
    )
    timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="mooncake: how long a store that does not run yet, or was lost, is waited for.",
    )


class UntilSpec(Spec):
    """Where a training in arrival order ends, and with it the course of its learning rate; exactly one of them."""

    steps: int | None = Field(default=None, ge=1, description="After so many optimizer steps.")
    samples: int | None = Field(
        default=None, ge=1, description="After as many whole global batches of so many samples."
    )
    source: bool = Field(
        default=False, description="With what the source has when the training begins, which is read to its end first."
    )

    @model_validator(mode="after")
    def _check_one(self) -> UntilSpec:
        given = sorted(self.model_dump(exclude_defaults=True))
        if len(given) != 1:
            raise ValueError(f"expected one of steps, samples or source, found {' and '.join(given) or 'none'}")
        return self

    def count_steps(self, global_batch_size: int) -> int | None:
        """Return the optimizer steps; None where only the source says it. Raises ValueError if there is none."""
        if self.samples is None:
            return self.steps
        if self.samples < global_batch_size:
            raise ValueError(
                f"streaming.until.samples: expected at least training.global_batch_size, {global_batch_size}, found "
                f"{self.samples}"
            )
        return self.samples // global_batch_size


class StreamingSpec(Spec):
    """How features stream from producers to a trainer."""

    order: Literal["planned", "arrival"] = Field(
        default="planned",
        description="planned: the samples of a data set that is complete, in the order of a stored set. arrival: of rows that "
        "still come, each once, as they come; needs `until`.",
    )
    source: str | None = Field(
        default=None,
        min_length=1,
        description="arrival: name of an entry point of the group draftworks.sources that gives an iterator of rows; null: the "
        "lines of the entry's `dataset`, whose files grow.",
    )
    until: UntilSpec | None = Field(default=None, description="arrival: where the training ends.")
    vocabulary_samples: int | None = Field(
        default=None,
        ge=2,
        description="arrival: the first so many rows of `dataset` are prepared before: draft vocabularies are counted on their "
        "training part, and drafts measured on their held-out part. null, with a `source`: all rows.",
    )
    watermark: WatermarkSpec = Field(default_factory=WatermarkSpec)
    keep: Literal["auto", "until_last_use", "capture_again"] = Field(
        default="auto",
        description="until_last_use keeps features for later epochs, capture_again frees them and pays the target's "
        "forward pass again in each epoch. auto keeps them if all of them fit into capture.budget_gb.",
    )
    free_at: Literal["step", "checkpoint"] = Field(
        default="step",
        description="When features that nothing needs any more are freed. step holds less; after a crash, what the steps "
        "since the last checkpoint used is captured again. checkpoint holds it until then, as arrival order always does.",
    )
    timeout_s: float = Field(default=1800.0, gt=0, description="How long the trainer waits for one sample's features.")
    lease_s: float = Field(
        default=120.0,
        gt=0,
        description="After this time without a sign of life, a producer's task goes to another one.",
    )
    store: StreamStoreSpec = Field(default_factory=StreamStoreSpec)
    control_folder: str | None = Field(
        default=None,
        description="Folder of the control plane's database, on a local disk of the launcher's host, relative to the "
        "registry; null: below `var`.",
    )
    control: ControlSpec | None = Field(
        default=None,
        description="A control server owns the control plane's database; null: all processes open it, which have to run on "
        "one host.",
    )
    share: bool = Field(
        default=False,
        description="Train the drafts of a run together from one stream, so that the target's forward pass is paid once. "
        "Their trainings need the same seed and global batch.",
    )

    @property
    def arrives(self) -> bool:
        """Whether samples are trained in the order in which they come."""
        return self.order == "arrival"

    @model_validator(mode="after")
    def _check_order(self) -> StreamingSpec:
        given = [name for name in ("source", "until", "vocabulary_samples") if getattr(self, name) is not None]
        if not self.arrives:
            if given:
                raise ValueError(f"{given[0]} has no effect on order planned: set order to arrival, or leave it out")
            return self
        if self.until is None:
            raise ValueError(
                "until: order arrival needs an end, which the learning rate follows: steps, samples or source"
            )
        if self.source is None and self.vocabulary_samples is None:
            raise ValueError(
                "vocabulary_samples: order arrival needs the number of rows that are prepared before, for draft vocabulary and "
                "held-out part, as the data set grows"
            )
        if self.share:
            raise ValueError("share: trainings in arrival order have a stream each: leave share out")
        if self.store.kind != "shared_dir":
            raise ValueError(f"store.kind {self.store.kind}: order arrival needs shared_dir, as its size is not known")
        return self

    def identify_arrival(self) -> dict[str, Any] | None:
        """Return what decides the samples of a training in arrival order, beside the data set; None in planned order."""
        if self.until is None or not self.arrives:
            return None
        until = self.until.model_dump(exclude_defaults=True)
        return {"order": self.order, "until": until, "source": self.source, "rows": self.vocabulary_samples}

    def resolve_keep(self, nbytes: int, budget_gb: float) -> StreamingSpec:
        """Return the settings with `keep: auto` decided for features of `nbytes` bytes in all."""
        if self.keep != "auto":
            return self
        fits = nbytes <= budget_gb * 1e9
        return self.model_copy(update={"keep": "until_last_use" if fits else "capture_again"})


def count_steps(epochs: float, max_steps: int | None, steps_per_epoch: int) -> int:
    """Return the optimizer steps of `epochs` of the data: at least one, at most `max_steps` (which may be 0)."""
    steps = max(1, round(epochs * steps_per_epoch))
    return steps if max_steps is None else min(steps, max_steps)


class StreamSteps(Spec):
    """What decides which samples each optimizer step takes."""

    global_batch_size: int = Field(ge=1)
    seed: int
    total_steps: int = Field(ge=0, description="Steps of a training on the complete set.")
    epochs: float | None = Field(default=None, gt=0, description="Needed where samples may be left out.")
    max_steps: int | None = Field(default=None, ge=0)

    def recount(self, samples: int) -> StreamSteps:
        """Return the steps of the same training on so many samples. Raises ConfigError if `epochs` is not given."""
        if self.epochs is None:
            raise ConfigError("stream steps: expected `epochs`, since samples are left out, found none")
        total_steps = count_steps(self.epochs, self.max_steps, samples // self.global_batch_size)
        return self.model_copy(update={"total_steps": total_steps})


class StreamFollower(Spec):
    """One of several trainings that read the same stream of features."""

    name: str = Field(description="Its name as a consumer in the control plane.")
    streams: list[str] = Field(description="Names of the feature streams that it reads.")
    steps: StreamSteps


def require_one_schedule(followers: Sequence[StreamFollower]) -> None:
    """Raise ConfigError if two followers of a stream have the same name, or take different samples at a step."""
    for other in followers[1:]:
        first = followers[0]
        if other.name in [each.name for each in followers if each is not other]:
            raise ConfigError(f"two trainings that follow one stream have the same name, {other.name}")
        for name in ("seed", "global_batch_size"):
            expected, found = getattr(first.steps, name), getattr(other.steps, name)
            if expected != found:
                raise ConfigError(
                    f"{first.name} and {other.name} cannot follow one stream: {name} is {expected} and {found}. Give both "
                    "the same, or each a stream of its own (streaming.share: false)"
                )
