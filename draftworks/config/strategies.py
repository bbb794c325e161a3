"""Torch-free specification of draft strategies, and the register of all known strategies."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import model_validator

from draftworks.config.registry_files import Spec, StrategyEntry
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap
from draftworks.storage.words import suggest_or_list

PLUGINS = "draftworks.strategies"
"""Entry-point group: every process imports its modules, and each import registers strategies."""

LayerCounting = Literal["layers_passed", "layer_output"]
"""How a format numbers a tap: by `hf_index` itself, or by the 0-based layer that wrote the stream (one less)."""


class StrategyOptions(Spec):
    """Base of a strategy's options.

    Attributes:
        structural: names of options that decide what the draft computes, beyond its sizes; a draft that starts from
            another must have equal values. The other options affect its training.
        execution: names of options that decide only how the draft is computed; they are not in its identity.
        added: names of options that are newer than existing drafts; they are left out of the identity at their
            default, so that the identities of those drafts stay the same.
    """

    structural: ClassVar[tuple[str, ...]] = ()
    execution: ClassVar[tuple[str, ...]] = ()
    added: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _has_a_teacher(cls, values: Any) -> Any:
        name = "teacher_temperature"
        if isinstance(values, Mapping) and name in values and name not in cls.model_fields:
            raise ValueError(
                f"{name}: this strategy's labels are tokens, and a temperature softens none: leave it out, or take a strategy "
                "that has the option"
            )
        return values

    def to_identity(self) -> dict[str, Any]:
        """Return the options that decide the draft, by name."""
        unset = [name for name in self.added if getattr(self, name) == type(self).model_fields[name].default]
        return self.model_dump(exclude={*self.execution, *unset})

    def select_structural(self) -> dict[str, Any]:
        """Return the structural options and their values."""
        return {name: getattr(self, name) for name in self.structural}


@dataclass(frozen=True)
class ExportSpec:
    """A format of other software in which a strategy's drafts can be written.

    Attributes:
        name: unique among all strategies, such as `sglang_eagle3`.
        description: software that loads it, and from which version on.
        factory: dotted path `module:callable` of the `ExportFormat` (see draftworks.export.export_format).
        reader: dotted path `module:callable` that makes an `ExportReader` from an `ExportFolder`, `TargetTensors` and a
            dtype (see draftworks.export.readers.reader); it shares no code with the format's writer.
        counting: how its layer ids number the taps.
        refuses: returns why the format cannot hold a draft of these options and taps, or None; see `find_refusal`.
        uses_unscaled_embeddings: whether its loaders look up unscaled rows of the target's embedding matrix, although the draft
            embeds as the target does.
        model_types: types of targets (of the text config) whose drafts its loaders know; None if it does not matter.
        on_request: whether it is written only where `export.formats` names it.
        revision: of what is written; a larger one makes exports anew.
    """

    name: str
    description: str
    factory: str
    reader: str
    counting: LayerCounting
    refuses: Callable[[Any, tuple[LayerTap, ...]], str | None] | None = None
    uses_unscaled_embeddings: bool = False
    model_types: tuple[str, ...] | None = None
    on_request: bool = False
    revision: int = 1

    @property
    def identity(self) -> str:
        """The name, and the revision from the second on."""
        return self.name if self.revision == 1 else f"{self.name}@{self.revision}"

    def __post_init__(self) -> None:
        ways = get_args(LayerCounting)
        if self.counting not in ways:
            raise ConfigError(
                f"export format {self.name}: counting: expected one of {', '.join(ways)}, found {self.counting!r}"
            )

    def find_refusal(self, options: StrategyOptions, taps: tuple[LayerTap, ...]) -> str | None:
        """Return why a server could not compute the same with an exported draft of these options; None if it can."""
        if self.counting == "layer_output" and any(tap.hf_index == 0 for tap in taps):
            return (
                f"layer_ids {[tap.hf_index for tap in taps]}: 0 is the embeddings, which have no number in this format"
            )
        return None if self.refuses is None else self.refuses(options, taps)

    def find_type_refusal(self, model_type: str | None) -> str | None:
        """Return why no draft of a target of this type can be written; None if one can."""
        if self.model_types is None or model_type in self.model_types:
            return None
        return f"a target of type {model_type}: this format's loaders know {', '.join(self.model_types)}"

    def find_embedding_refusal(self, scale: float) -> str | None:
        """Return why no draft can be written for a target that scales its embeddings by `scale`; None if one can."""
        if not self.uses_unscaled_embeddings or scale == 1:
            return None
        return f"the target multiplies its embeddings by {scale:.4g}, which its loaders do not do"


@dataclass(frozen=True)
class MetricSums:
    """The sums that an evaluation of a strategy's drafts adds up, beside those of the accuracy; each with its `_denoms`.

    Attributes:
        places: number of draft steps, or of places of a block.
        by_place: names of sums that have a value for each, without `_sums`.
        by_block: names of sums that have one value, without `_sums`.
    """

    places: int
    by_place: tuple[str, ...] = ("loss",)
    by_block: tuple[str, ...] = ()


def _refuse_packing(options: StrategyOptions) -> str | None:
    return "does not support packed samples"


def allow_packing(options: StrategyOptions) -> str | None:
    """Return None: the value of `packing_refusal` for a strategy whose `DraftStrategy` has `pack` under all options."""
    return None


def _take_no_batch_means(options: StrategyOptions) -> bool:
    return False


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target that its entry and config.json give, without its weights."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int


FitDefault = Callable[[Any, Mapping[str, Any], TargetSizes], Any]
"""What the default of an option becomes for a target, given the default and the other options of the entry."""


@dataclass(frozen=True)
class StrategySpec:
    """Torch-free specification of a strategy.

    Attributes:
        options: class of the typed options, with defaults.
        taps: returns the layer taps to capture, from the target's number of layers and the options.
        uses_last_hidden: whether the teacher is recomputed from the last hidden state.
        uses_vocab_mapping: whether the draft predicts over a reduced vocabulary; its options then have
            `draft_vocab_size`.
        fitted: by the name of an option, what its default becomes for a target that is too small for it; given the default,
            the options of the entry and the target's sizes. What an entry says is not changed, and judged by `check`.
        check: raises ConfigError for options that do not fit the target's sizes, beyond the errors of `taps`.
        heads_divide_hidden: whether servers read the draft with a class whose number of heads must divide the hidden size;
            if the target's number does not, the draft has a number of its own.
        packing_refusal: returns why training under these options cannot be packed, None if it can; see `check_packing`.
        batch_means: whether the loss under these options is made of means over micro-batches, so that their size decides what is
            learnt. It is in the identity of such drafts, see `TrainingSpec.to_identity`.
        factory: dotted path `module:callable` of the `DraftStrategy` (see draftworks.drafts.strategy).
        exports: formats its drafts can be written in.
        metric_sums: returns what an evaluation reports under these options; None if it is known only once one was made.
    """

    name: str
    description: str
    options: type[StrategyOptions]
    taps: Callable[[int, Any], tuple[LayerTap, ...]]
    factory: str
    uses_last_hidden: bool = True
    uses_vocab_mapping: bool = False
    fitted: Mapping[str, FitDefault] = field(default_factory=dict)
    check: Callable[[Any, TargetSizes], None] | None = None
    heads_divide_hidden: bool = False
    packing_refusal: Callable[[Any], str | None] = _refuse_packing
    batch_means: Callable[[Any], bool] = _take_no_batch_means
    exports: tuple[ExportSpec, ...] = ()
    metric_sums: Callable[[Any], MetricSums] | None = None

    def list_features(self, num_layers: int, options: StrategyOptions) -> tuple[str, ...]:
        """Return the names of the stored features that a training sample needs: taps, ascending, then `last`."""
        names = tuple(tap.name for tap in self.taps(num_layers, options))
        return (*names, "last") if self.uses_last_hidden else names

    def parse_options(self, values: dict[str, Any], where: str) -> Any:
        """Return the validated options. Raises ConfigError, beginning with `where`, for an unknown key or bad value."""
        return parse_spec(self.options, values, where, beside=lambda: {"strategies.NAME": StrategyEntry})

    def fit_defaults(self, values: Mapping[str, Any], target: TargetSizes) -> dict[str, Any]:
        """Return an entry's options with those defaults added that are too large for a target, lowered to what fits."""
        lowered = {}
        for name in self.fitted.keys() - values.keys():
            default = self.options.model_fields[name].default
            lowered[name] = self.fitted[name](default, values, target)
            if lowered[name] == default:
                del lowered[name]
        return {**values, **dict(sorted(lowered.items()))}

    def identify_options(self, options: StrategyOptions, hidden_size: int, num_heads: int | None) -> dict[str, Any]:
        """Return the options that decide the draft for a target of these sizes, by name.

        Older versions made drafts whose number of heads does not divide the hidden size, which no server accepts. The
        extra `num_heads` entry gives the drafts made now another identity.
        """
        uneven = num_heads is not None and hidden_size % num_heads and getattr(options, "num_heads", None) is None
        return options.to_identity() | ({"num_heads": "dividing"} if self.heads_divide_hidden and uneven else {})

    @property
    def usual_exports(self) -> tuple[ExportSpec, ...]:
        """The formats that are written where an entry names none."""
        return tuple(export for export in self.exports if not export.on_request)

    def identify_exports(self, wanted: Iterable[str] | None) -> list[str]:
        """Return what decides how an entry's exports are written: the usual formats, and of the others those that it names."""
        named = set(wanted or ())
        return [export.identity for export in self.exports if not export.on_request or export.name in named]

    def export(self, name: str) -> ExportSpec:
        """Return the export format with that name. Raises ConfigError with the closest names if it is unknown."""
        formats = {spec.name: spec for spec in self.exports}
        if name not in formats:
            raise ConfigError(f"strategy {self.name} has no export format {name!r}: {suggest_or_list(name, formats)}")
        return formats[name]

    def find_refusals(
        self, options: StrategyOptions, taps: tuple[LayerTap, ...], wanted: Iterable[str] | None = None
    ) -> dict[str, str]:
        """Return name and reason of the formats in `wanted` (None: the usual ones) that cannot hold a draft of these options."""
        formats = self.usual_exports if wanted is None else [self.export(name) for name in wanted]
        reasons = {spec.name: spec.find_refusal(options, taps) for spec in formats}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def check_packing(self, options: StrategyOptions, where: str) -> None:
        """Raise ConfigError if samples cannot be packed: the draft or its loss supports only padded batches."""
        reason = self.packing_refusal(options)
        if reason is not None:
            raise ConfigError(f"{where}: pack_tokens is set, but {self.name} {reason}. Leave pack_tokens out")

    def load_factory(self) -> Callable[..., Any]:
        """Import and return the callable that makes the `DraftStrategy`."""
        return load_dotted(self.factory)


def load_dotted(path: str) -> Any:
    """Import and return the attribute that `module:attribute` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


_REGISTRY: dict[str, StrategySpec] = {}


def register_strategy(spec: StrategySpec) -> StrategySpec:
    """Register a strategy for this process and return it.

    Raises:
        ConfigError: the name of the strategy or of one of its export formats is taken.
    """
    if spec.name in _REGISTRY:
        raise ConfigError(f"strategy {spec.name!r} is registered already")
    owners = {export.name: strategy.name for strategy in _REGISTRY.values() for export in strategy.exports}
    for export in spec.exports:
        if export.name in owners:
            owner = owners[export.name]
            raise ConfigError(
                f"strategy {spec.name!r}: export format {export.name!r} belongs to strategy {owner!r}: rename it"
            )
        owners[export.name] = spec.name
    _REGISTRY[spec.name] = spec
    return spec


def resolve_strategy(name: str) -> StrategySpec:
    """Return the strategy with that name. Raises ConfigError with the closest names if it is unknown."""
    known = list_strategies()
    if name not in known:
        raise ConfigError(f"unknown strategy {name!r}: {suggest_or_list(name, known)}")
    return _REGISTRY[name]


def resolve_export(name: str) -> ExportSpec:
    """Return any strategy's export format with that name. Raises ConfigError with the closest names if unknown."""
    formats = {export.name: export for strategy in list_strategies() for export in _REGISTRY[strategy].exports}
    if name not in formats:
        raise ConfigError(f"unknown export format {name!r}: {suggest_or_list(name, formats)}")
    return formats[name]


def list_strategies() -> tuple[str, ...]:
    """Return the names of all strategies, plug-ins included, sorted."""
    _load_plugins()
    return tuple(sorted(_REGISTRY))


def list_option_models() -> dict[str, type[StrategyOptions]]:
    """Return the options of every strategy by their place in an entry."""
    return {f"strategies.{name}.options": resolve_strategy(name).options for name in list_strategies()}


@functools.cache
def _load_plugins() -> None:
    """Import the module of every strategy: the package's own from its folders, those of other packages by entry points."""
    for options in sorted((Path(__file__).parents[1] / "strategies").glob("*/options.py")):
        importlib.import_module(f"draftworks.strategies.{options.parent.name}.options")
    for plugin in entry_points(group=PLUGINS):
        plugin.load()
