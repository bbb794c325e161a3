"""Base class of all models that are read from YAML. Torch-free."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16"]


class Spec(BaseModel):
    """Base of all models read from YAML: frozen, no unknown keys, finite numbers only (digests use JSON, which has no others)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


SpecType = TypeVar("SpecType", bound=Spec)
