"""Draft strategies, a folder each: options (torch-free), model with its loss, strategy with its drafter, export, reader.

Nothing here imports them: they are entry points of pyproject.toml, as a plug-in's are. What a plug-in needs to describe
itself is named here.
"""

from draftworks.config.strategies import (
    ExportSpec,
    FitDefault,
    LayerCounting,
    StrategyOptions,
    StrategySpec,
    TargetSizes,
    allow_packing,
    list_strategies,
    load_dotted,
    register_strategy,
    resolve_export,
    resolve_strategy,
)

__all__ = [
    "ExportSpec",
    "FitDefault",
    "LayerCounting",
    "StrategyOptions",
    "StrategySpec",
    "TargetSizes",
    "allow_packing",
    "list_strategies",
    "load_dotted",
    "register_strategy",
    "resolve_export",
    "resolve_strategy",
]
