"""What the platform knows of a draft strategy before it imports torch, and the register of those it knows."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

from draftworks.errors import ConfigError
from draftworks.identity import LayerTap
from draftworks.specs import Spec, validated

PLUGINS = "draftworks.strategies"
"""Entry-point group: importing a module named there registers strategies of other packages, in every process."""


class StrategyOptions(Spec):
    """Base of a strategy's options.

    `structural` names those that decide what the draft computes, beyond its sizes: a draft that begins from another has
    to agree with it in them. The others shape its training.
    """

    structural: ClassVar[tuple[str, ...]] = ()

    def identity(self) -> dict[str, Any]:
        """What decides the draft; options that only say how it is computed are left out."""
        return self.model_dump()

    def structure(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.structural}


@dataclass(frozen=True)
class ExportSpec:
    """A format of other software in which a strategy's drafts can be written.

    Attributes:
        name: unique, such as `sglang_eagle3`.
        description: who loads it, from which version on.
        factory: dotted path `module:callable` of the `ExportFormat` (see draftworks.export.export_format).
    """

    name: str
    description: str
    factory: str


@dataclass(frozen=True)
class StrategySpec:
    """What the platform must know of a strategy before it imports torch.

    Attributes:
        options: typed options, with defaults.
        taps: the layer taps a target with `num_layers` layers needs under given options.
        uses_last_hidden: whether the teacher is recomputed from the last hidden state.
        uses_vocab_mapping: whether the draft predicts over a reduced vocabulary; its options then have `draft_vocab_size`.
        check: raises ConfigError for options that do not fit the target's sizes, beyond what `taps` finds.
        factory: dotted path `module:callable` of the `DraftStrategy` (see draftworks.drafts.strategy).
        exports: formats its drafts can be written in.
    """

    name: str
    description: str
    options: type[StrategyOptions]
    taps: Callable[[int, Any], tuple[LayerTap, ...]]
    factory: str
    uses_last_hidden: bool = True
    uses_vocab_mapping: bool = False
    check: Callable[[Any, TargetSizes], None] | None = None
    exports: tuple[ExportSpec, ...] = ()

    def features(self, num_layers: int, options: StrategyOptions) -> tuple[str, ...]:
        """Names of the stored features a training sample needs: taps in ascending order, then `last`."""
        names = tuple(tap.name for tap in self.taps(num_layers, options))
        return (*names, "last") if self.uses_last_hidden else names

    def parse_options(self, values: dict[str, Any], where: str) -> Any:
        return validated(self.options, values, where)

    def export(self, name: str) -> ExportSpec:
        """The export format of that name; ConfigError with the closest names for an unknown one."""
        formats = {spec.name: spec for spec in self.exports}
        if name not in formats:
            close = difflib.get_close_matches(name, formats, n=2)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            known = ", ".join(formats) or "none"
            raise ConfigError(f"strategy {self.name} has no export format {name!r}: {hint}Available: {known}")
        return formats[name]

    def load_factory(self) -> Callable[..., Any]:
        return load_dotted(self.factory)


@dataclass(frozen=True)
class TargetSizes:
    """What of a target's shape is known from its config alone."""

    num_layers: int
    hidden_size: int
    vocab_size: int


def load_dotted(path: str) -> Any:
    """The attribute that `module:attribute` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


_REGISTRY: dict[str, StrategySpec] = {}


def register_strategy(spec: StrategySpec) -> StrategySpec:
    """Make a strategy known to the whole platform; a second one of the same name is an error."""
    if spec.name in _REGISTRY:
        raise ConfigError(f"strategy {spec.name!r} is registered already")
    _REGISTRY[spec.name] = spec
    return spec


def resolve_strategy(name: str) -> StrategySpec:
    """The strategy of that name; ConfigError with the closest names for an unknown one."""
    known = available_strategies()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"unknown strategy {name!r}: {hint}Available: {', '.join(known)}")
    return _REGISTRY[name]


def available_strategies() -> tuple[str, ...]:
    """Names of all of them, those of plug-ins included."""
    _load_plugins()
    return tuple(sorted(_REGISTRY))


@functools.cache
def _load_plugins() -> None:
    for plugin in entry_points(group=PLUGINS):
        plugin.load()
