"""How buckets of object storage are reached, and where features lie in one. Torch-free."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import EnvironmentName, Spec
from draftworks.config.urls import parse_url
from draftworks.storage.object_access import parse_object_url


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
