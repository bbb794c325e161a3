"""Base class of all models that are read from YAML. Torch-free."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16"]
Item = TypeVar("Item", str, float)


def require_distinct(values: list[Item]) -> list[Item]:
    """Return the values. Raises ValueError if one is given twice."""
    repeated = next((each for number, each in enumerate(values) if each in values[:number]), None)
    if repeated is not None:
        raise ValueError(f"expected each once, found {repeated} twice")
    return values


def require_environment_name(value: str) -> str:
    """Return the name of an environment variable. Raises ValueError for anything else, as for the secret itself."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is None:
        raise ValueError("expected the name of an environment variable, such as SERVER_KEY, not what it holds")
    return value


EnvironmentName = Annotated[str, AfterValidator(require_environment_name)]
DistinctNames = Annotated[list[str], AfterValidator(require_distinct)]
DistinctNumbers = Annotated[list[float], AfterValidator(require_distinct)]


class Spec(BaseModel):
    """Base of all models read from YAML: frozen, no unknown keys, finite numbers only (digests use JSON, which has no others)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


SpecType = TypeVar("SpecType", bound=Spec)
