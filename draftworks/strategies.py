"""The draft strategies this platform knows, by name. Torch-free: factories are dotted paths, imported where work is done."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from draftworks.errors import ConfigError
from draftworks.identity import LayerTap
from draftworks.specs import Spec, validated


@dataclass(frozen=True)
class StrategySpec:
    """What the platform must know of a strategy before it imports torch.

    Attributes:
        options: typed options, with defaults.
        taps: the layer taps a target with `num_layers` layers needs under given options.
        uses_last_hidden: whether the teacher is recomputed from the last hidden state.
        uses_vocab_mapping: whether the draft predicts over a reduced vocabulary.
        factory: dotted path `module:callable` of the `DraftStrategy` (see draftworks.drafts.strategy).
    """

    name: str
    description: str
    options: type[Spec]
    taps: Callable[[int, Any], tuple[LayerTap, ...]]
    factory: str
    uses_last_hidden: bool = True
    uses_vocab_mapping: bool = False

    def features(self, num_layers: int, options: Spec) -> tuple[str, ...]:
        """Names of the stored features a training sample needs: taps in ascending order, then `last`."""
        names = tuple(tap.name for tap in self.taps(num_layers, options))
        return (*names, "last") if self.uses_last_hidden else names

    def parse_options(self, values: dict[str, Any], where: str) -> Any:
        return validated(self.options, values, where)

    def load_factory(self) -> Callable[..., Any]:
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)


class Eagle3Options(Spec):
    """EAGLE-3: one decoder layer over three fused taps, trained on its own outputs (test-time training)."""

    ttt_length: int = Field(
        7, ge=1, le=32, description="Draft steps unrolled in training; what one proposal can accept."
    )
    draft_vocab_size: int = Field(32000, ge=8, description="Most frequent supervised tokens the head predicts.")
    layer_ids: list[int] | None = Field(None, description="Taps as hf_index; default [2, L//2, L-3].")
    intermediate_size: int | None = Field(None, gt=0, description="Of the MLP; default the target's.")
    num_heads: int | None = Field(None, gt=0, description="Default the target's.")
    num_kv_heads: int | None = Field(None, gt=0, description="Default the target's.")
    step_decay: float = Field(0.8, gt=0, le=1, description="Weight of step i's loss is step_decay ** i.")
    loss: Literal["token_mean", "specforge"] = Field(
        "token_mean", description="Normalisation: by supervised tokens, or the reference's mean over all positions."
    )


def eagle3_taps(num_layers: int, options: Eagle3Options) -> tuple[LayerTap, ...]:
    """The three taps of EAGLE-3, ascending.

    Raises:
        ConfigError: a tap is not inside the target, taps collide, or there are not three.
    """
    return checked_taps("eagle3", options.layer_ids, [2, num_layers // 2, num_layers - 3], num_layers, count=3)


def checked_taps(
    strategy: str, given: list[int] | None, default: list[int], num_layers: int, count: int
) -> tuple[LayerTap, ...]:
    """Explicit or default layer ids as taps, with every way they can be wrong reported."""
    ids = default if given is None else given
    origin = "default" if given is None else "configured"
    where = f"{strategy}: {origin} layer ids {ids} of a target with {num_layers} layers"
    advice = "Set options.layer_ids to different hf_index values (0 = embeddings, k = after k layers)."
    if len(ids) != count:
        raise ConfigError(f"{where}: expected {count} taps, found {len(ids)}. {advice}")
    outside = [k for k in ids if not 0 <= k < num_layers]
    if outside:
        raise ConfigError(f"{where}: {outside} outside 0..{num_layers - 1}. {advice}")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: taps collide. {advice}")
    if sorted(ids) != ids:
        raise ConfigError(f"{where}: expected ascending order, so that the inputs of `fc` are unambiguous. {advice}")
    return tuple(LayerTap(k) for k in ids)


_REGISTRY: dict[str, StrategySpec] = {}


def register_strategy(spec: StrategySpec) -> StrategySpec:
    """Make a strategy known to the whole platform; a second one of the same name is an error."""
    if spec.name in _REGISTRY:
        raise ConfigError(f"strategy {spec.name!r} is registered already")
    _REGISTRY[spec.name] = spec
    return spec


def resolve_strategy(name: str) -> StrategySpec:
    """The strategy of that name; ConfigError with the closest names for an unknown one."""
    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, _REGISTRY, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"unknown strategy {name!r}: {hint}Available: {', '.join(available_strategies())}")
    return _REGISTRY[name]


def available_strategies() -> tuple[str, ...]:
    return tuple(sorted(_REGISTRY))


EAGLE3 = register_strategy(
    StrategySpec(
        name="eagle3",
        description="EAGLE-3: autoregressive draft of one decoder layer over three fused layers of the target.",
        options=Eagle3Options,
        taps=eagle3_taps,
        factory="draftworks.drafts.eagle3:Eagle3Strategy",
        uses_vocab_mapping=True,
    )
)
