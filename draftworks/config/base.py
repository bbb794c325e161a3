"""Base class of all models that are read from YAML. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

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

    @model_validator(mode="before")
    @classmethod
    def _refuse_switches_as_numbers(cls, values: Any) -> Any:
        """Raise ValueError for true or false where a number belongs, which Python would take for 1 or 0."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            field = cls.model_fields.get(name) if isinstance(value, bool) else None
            types = set() if field is None else {field.annotation, *get_args(field.annotation)}
            if types & {int, float} and bool not in types:
                raise ValueError(f"{name}: expected a number, found {str(value).lower()}")
        return values


SpecType = TypeVar("SpecType", bound=Spec)
