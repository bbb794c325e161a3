"""Where captured features are kept. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from draftworks.config.base import Spec
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
