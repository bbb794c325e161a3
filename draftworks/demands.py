"""What the strategies of a target ask of it together: taps and a draft vocabulary. Torch-free, checked before any cost."""

from __future__ import annotations

from draftworks.errors import ConfigError
from draftworks.runs import TargetFiles
from draftworks.specs import TargetSpec
from draftworks.strategies import TargetSizes, resolve_strategy


def check_demands(target: TargetSpec, files: TargetFiles) -> None:
    """ConfigError if the model cannot give what its strategies need."""
    union_of_taps(target, files.num_layers)
    sizes = TargetSizes(files.num_layers, files.hidden_size, files.vocab_size)
    for name, entry in target.strategies.items():
        strategy = resolve_strategy(name)
        if strategy.check is not None:
            strategy.check(strategy.parse_options(entry.options, where=f"target {target.name}: {name}"), sizes)
    size = draft_vocab_size(target)
    if size is not None and size > files.vocab_size:
        raise ConfigError(
            f"target {target.name}: draft_vocab_size {size} is larger than the model's vocabulary of {files.vocab_size}. "
            f"Set options.draft_vocab_size to at most that"
        )


def union_of_taps(target: TargetSpec, num_layers: int) -> list[int]:
    """hf_index of every tap that any strategy of the target needs, ascending.

    Raises:
        ConfigError: a strategy's taps lie outside the target or collide.
    """
    taps: set[int] = set()
    for name, entry in target.strategies.items():
        strategy = resolve_strategy(name)
        options = strategy.parse_options(entry.options, where=f"target {target.name}: {name}")
        taps.update(tap.hf_index for tap in strategy.taps(num_layers, options))
    return sorted(taps)


def draft_vocab_size(target: TargetSpec) -> int | None:
    """The one reduced vocabulary that the target's strategies share; None if none of them reduces it.

    Raises:
        ConfigError: two strategies of the target ask for different sizes.
    """
    sizes: dict[str, int] = {}
    for name, entry in target.strategies.items():
        strategy = resolve_strategy(name)
        if strategy.uses_vocab_mapping:
            options = strategy.parse_options(entry.options, where=f"target {target.name}: {name}")
            sizes[name] = options.draft_vocab_size
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"target {target.name}: strategies share one draft vocabulary, but ask for sizes {sizes}")
    return next(iter(sizes.values()), None)
