"""Options of a target's data mix: further data sets, and weights of slices. Torch-free."""

from __future__ import annotations

from pydantic import Field, field_validator

from draftworks.config.base import Spec
from draftworks.storage.names import require_name


class MixSpec(Spec):
    """Further data of a target: conversations of other data sets, trained on and held out like those of `dataset`."""

    datasets: list[str] = Field(
        default_factory=list,
        description="Names of further entries in registry/datasets/, such as one of served prompts.",
    )
    weights: str | None = Field(
        default=None,
        description="File that `draftworks slices --save` wrote, relative to the registry: conversations of slices that fell "
        "are taken more often. Needs data.max_conversations.",
    )

    @field_validator("datasets")
    @classmethod
    def _check_names(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"expected each data set once, found {', '.join(value)}")
        return [require_name(name) for name in value]

    def require_effect(self, dataset: str, max_conversations: int | None) -> None:
        """Raise ValueError if the target's own data set is named again, or if weights have nothing to choose among."""
        if dataset in self.datasets:
            raise ValueError(f"mix.datasets: {dataset} is the target's dataset already: leave it out")
        if self.weights is not None and max_conversations is None:
            raise ValueError(
                "mix.weights choose among more conversations than are used: set data.max_conversations below their number"
            )
