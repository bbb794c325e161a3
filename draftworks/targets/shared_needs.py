"""What the strategies of one target need together: taps, and the size of a reduced vocabulary. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import resolve_strategy
from draftworks.errors import ConfigError


def collect_taps(target: TargetSpec, num_layers: int) -> list[int]:
    """Return the hf_index of every tap that any strategy of the target needs, ascending and without duplicates.

    Raises:
        ConfigError: a strategy's taps lie outside the target or collide.
    """
    taps: set[int] = set()
    for name, entry in target.strategies.items():
        strategy = resolve_strategy(name)
        options = strategy.parse_options(entry.options, where=f"target {target.name}: {name}")
        with name_target_in_errors(target):
            taps.update(tap.hf_index for tap in strategy.taps(num_layers, options))
    return sorted(taps)


def resolve_draft_vocab_size(target: TargetSpec) -> int | None:
    """Return the size of the reduced vocabulary that the target's strategies share; None if none of them has one.

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
        raise ConfigError(
            f"target {target.name}: strategies share one draft vocabulary, but ask for sizes {sizes}. "
            "Set the same options.draft_vocab_size for all of them"
        )
    return next(iter(sizes.values()), None)


@contextmanager
def name_target_in_errors(target: TargetSpec) -> Iterator[None]:
    """Prefix a ConfigError raised inside with the target's name; a strategy's own error names only the strategy."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"target {target.name}: {error}") from error
