"""What the platform knows of a draft strategy before it imports torch, and the register of those it knows."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from draftworks.config.registry_files import Spec
from draftworks.config.validation import parse_spec
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap

PLUGINS = "draftworks.strategies"
"""Entry-point group: importing a module named there registers strategies, in every process."""

LayerCounting = Literal["layers_passed", "layer_output"]
"""How a format numbers a tap: `hf_index` itself, or the 0-based layer that wrote the stream, one less."""


class StrategyOptions(Spec):
    """Base of a strategy's options.

    Attributes:
        structural: those that decide what the draft computes, beyond its sizes: a draft that begins from another has to
            agree with it in them. The others shape its training.
        execution: those that only say how it is computed, and are no part of what it is.
        added: those that came when there were drafts already, which are what they were as long as these stay at default.
    """

    structural: ClassVar[tuple[str, ...]] = ()
    execution: ClassVar[tuple[str, ...]] = ()
    added: ClassVar[tuple[str, ...]] = ()

    def identity(self) -> dict[str, Any]:
        """What decides the draft."""
        unset = [name for name in self.added if getattr(self, name) == type(self).model_fields[name].default]
        return self.model_dump(exclude={*self.execution, *unset})

    def structure(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.structural}


@dataclass(frozen=True)
class ExportSpec:
    """A format of other software in which a strategy's drafts can be written.

    Attributes:
        name: unique among all strategies, such as `sglang_eagle3`.
        description: who loads it, from which version on.
        factory: dotted path `module:callable` of the `ExportFormat` (see draftworks.export.export_format).
        reader: dotted path `module:callable` of what makes an `ExportReader` of an `ExportFolder`, `TargetTensors` and a
            dtype (see draftworks.export.readers.reader), without code of the format's own.
        counting: of its layer ids.
        refuses: see `refusal`, which asks it.
        embeds_rows: the draft embeds as the target does, but its loaders look up bare rows of the target's matrix.
    """

    name: str
    description: str
    factory: str
    reader: str
    counting: LayerCounting
    refuses: Callable[[Any, tuple[LayerTap, ...]], str | None] | None = None
    embeds_rows: bool = False

    def __post_init__(self) -> None:
        ways = get_args(LayerCounting)
        if self.counting not in ways:
            raise ConfigError(
                f"export format {self.name}: counting: expected one of {', '.join(ways)}, found {self.counting!r}"
            )

    def find_refusal(self, options: StrategyOptions, taps: tuple[LayerTap, ...]) -> str | None:
        """Why no draft of these options and taps can be written so that a server computes the same; None if one can."""
        if self.counting == "layer_output" and any(tap.hf_index == 0 for tap in taps):
            return (
                f"layer_ids {[tap.hf_index for tap in taps]}: 0 is the embeddings, which have no number in this format"
            )
        return None if self.refuses is None else self.refuses(options, taps)

    def find_embedding_refusal(self, scale: float) -> str | None:
        """Why no draft for a target that multiplies its embeddings by `scale` can be written; None if one can."""
        if not self.embeds_rows or scale == 1:
            return None
        return f"the target multiplies its embeddings by {scale:.4g}, of which this format's loaders know nothing"


def _refuse_packing(options: StrategyOptions) -> str | None:
    return "does not know packed samples"


def always_packable(options: StrategyOptions) -> str | None:
    """For a strategy whose `DraftStrategy` has `pack`, whatever its options."""
    return None


@dataclass(frozen=True)
class StrategySpec:
    """What the platform must know of a strategy before it imports torch.

    Attributes:
        options: typed options, with defaults.
        taps: the layer taps a target with `num_layers` layers needs under given options.
        uses_last_hidden: whether the teacher is recomputed from the last hidden state.
        uses_vocab_mapping: whether the draft predicts over a reduced vocabulary; its options then have `draft_vocab_size`.
        check: raises ConfigError for options that do not fit the target's sizes, beyond what `taps` finds.
        divides_heads: servers read the draft by a class whose heads must divide the hidden size, so that it has a number of
            its own where the target's do not.
        unpackable: why no training under such options can be packed, None if one can; see `check_packing`.
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
    divides_heads: bool = False
    unpackable: Callable[[Any], str | None] = _refuse_packing
    exports: tuple[ExportSpec, ...] = ()

    def list_features(self, num_layers: int, options: StrategyOptions) -> tuple[str, ...]:
        """Names of the stored features a training sample needs: taps in ascending order, then `last`."""
        names = tuple(tap.name for tap in self.taps(num_layers, options))
        return (*names, "last") if self.uses_last_hidden else names

    def parse_options(self, values: dict[str, Any], where: str) -> Any:
        return parse_spec(self.options, values, where)

    def identity(self, options: StrategyOptions, hidden_size: int, num_heads: int | None) -> dict[str, Any]:
        """What of a strategy decides the draft for a target of these sizes. Drafts with heads that do not divide it were made
        when this was not seen, and no server takes them: they are not taken for those that are made now.
        """
        uneven = num_heads is not None and hidden_size % num_heads and getattr(options, "num_heads", None) is None
        return options.identity() | ({"num_heads": "dividing"} if self.divides_heads and uneven else {})

    def export(self, name: str) -> ExportSpec:
        """The export format of that name; ConfigError with the closest names for an unknown one."""
        formats = {spec.name: spec for spec in self.exports}
        if name not in formats:
            raise ConfigError(f"strategy {self.name} has no export format {name!r}: {_suggest_names(name, formats)}")
        return formats[name]

    def find_refusals(
        self, options: StrategyOptions, taps: tuple[LayerTap, ...], wanted: Iterable[str] | None = None
    ) -> dict[str, str]:
        """Of the formats `wanted`, or of all, those that cannot hold such a draft, with the reason."""
        formats = self.exports if wanted is None else [self.export(name) for name in wanted]
        reasons = {spec.name: spec.find_refusal(options, taps) for spec in formats}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def check_packing(self, options: StrategyOptions, where: str) -> None:
        """ConfigError if samples cannot be packed: the draft has no such batches, or its loss is of padded ones."""
        reason = self.unpackable(options)
        if reason is not None:
            raise ConfigError(f"{where}: pack_tokens is set, but {self.name} {reason}. Leave pack_tokens out")

    def load_factory(self) -> Callable[..., Any]:
        return load_dotted(self.factory)


@dataclass(frozen=True)
class TargetSizes:
    """What of a target's shape is known from its config alone."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int


def load_dotted(path: str) -> Any:
    """The attribute that `module:attribute` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


_REGISTRY: dict[str, StrategySpec] = {}


def register_strategy(spec: StrategySpec) -> StrategySpec:
    """Make a strategy known to the whole platform.

    Raises:
        ConfigError: a second one of the same name, or with an export format whose name is taken.
    """
    if spec.name in _REGISTRY:
        raise ConfigError(f"strategy {spec.name!r} is registered already")
    owners = {export.name: strategy.name for strategy in _REGISTRY.values() for export in strategy.exports}
    for export in spec.exports:
        if export.name in owners:
            owner = owners[export.name]
            raise ConfigError(
                f"strategy {spec.name!r}: export format {export.name!r} is one of strategy {owner!r}: rename it"
            )
        owners[export.name] = spec.name
    _REGISTRY[spec.name] = spec
    return spec


def resolve_strategy(name: str) -> StrategySpec:
    """The strategy of that name; ConfigError with the closest names for an unknown one."""
    known = available_strategies()
    if name not in known:
        raise ConfigError(f"unknown strategy {name!r}: {_suggest_names(name, known)}")
    return _REGISTRY[name]


def resolve_export(name: str) -> ExportSpec:
    """The export format of that name, of any strategy; ConfigError with the closest names for an unknown one."""
    formats = {export.name: export for strategy in available_strategies() for export in _REGISTRY[strategy].exports}
    if name not in formats:
        raise ConfigError(f"unknown export format {name!r}: {_suggest_names(name, formats)}")
    return formats[name]


def available_strategies() -> tuple[str, ...]:
    """Names of all of them, those of plug-ins included."""
    _load_plugins()
    return tuple(sorted(_REGISTRY))


def _suggest_names(name: str, known: Iterable[str]) -> str:
    """For the error about an unknown name: those it may have been meant for, and all there are."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}Available: {', '.join(known) or 'none'}"


@functools.cache
def _load_plugins() -> None:
    """Import the module of every strategy: those here and those of other packages are entry points alike."""
    named = {(plugin.name, plugin.value): plugin for plugin in entry_points(group=PLUGINS)}
    for plugin in named.values():
        plugin.load()
    _load_own({value for _, value in named})


def _load_own(installed: Set[str]) -> None:
    """Where the package is read from a checkout without being installed, as in an engine's environment, there are no entry
    points, and its own strategies are its folders.

    Raises:
        ConfigError: it is installed, but was before a strategy came.
    """
    folders = sorted(path.parent.name for path in (Path(__file__).parents[1] / "strategies").glob("*/options.py"))
    modules = {name: f"{PLUGINS}.{name}.options" for name in folders}
    missing = [name for name, module in modules.items() if module not in installed]
    if not missing:
        return
    try:
        place = distribution("draftworks").locate_file("")
    except PackageNotFoundError:
        for name in missing:
            importlib.import_module(modules[name])
        return
    raise ConfigError(
        f"strategies {', '.join(missing)}: expected entry points of group {PLUGINS}, found none in {place}: the environment "
        "was installed before they came. Install it again: pip install -e . (or make)"
    )
