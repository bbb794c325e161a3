"""The base of everything read from YAML. Torch-free."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Base of everything read from YAML: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


SpecType = TypeVar("SpecType", bound=Spec)
