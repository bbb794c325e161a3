"""The draft strategies this platform knows, by name. Torch-free: factories are dotted paths, imported where work is done."""

from draftworks.strategies.dflash import DFLASH, DFlashOptions, dflash_taps
from draftworks.strategies.domino import DOMINO, DominoOptions
from draftworks.strategies.dspark import DSPARK, DSparkOptions
from draftworks.strategies.eagle3 import EAGLE3, Eagle3Options, eagle3_taps
from draftworks.strategies.peagle import PEAGLE, PEagleOptions
from draftworks.strategies.spec import (
    ExportSpec,
    LayerCounting,
    StrategyOptions,
    StrategySpec,
    TargetSizes,
    always_packable,
    available_strategies,
    load_dotted,
    register_strategy,
    resolve_export,
    resolve_strategy,
)

__all__ = [
    "DFLASH",
    "DOMINO",
    "DSPARK",
    "EAGLE3",
    "PEAGLE",
    "DFlashOptions",
    "DSparkOptions",
    "DominoOptions",
    "Eagle3Options",
    "ExportSpec",
    "LayerCounting",
    "PEagleOptions",
    "StrategyOptions",
    "StrategySpec",
    "TargetSizes",
    "always_packable",
    "available_strategies",
    "dflash_taps",
    "eagle3_taps",
    "load_dotted",
    "register_strategy",
    "resolve_export",
    "resolve_strategy",
]
