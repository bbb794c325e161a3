"""EAGLE-3 under the name of another package, for a server of its own: other layer ids, another name for `fc`."""

from __future__ import annotations

from draftworks.strategies import ExportSpec, StrategySpec, register_strategy
from draftworks.strategies.eagle3.options import Eagle3Options, choose_eagle3_taps

FUSED = register_strategy(
    StrategySpec(
        name="fused_eagle3",
        description="EAGLE-3.",
        options=Eagle3Options,
        taps=choose_eagle3_taps,
        factory="fused_format:FusedStrategy",
        uses_vocab_mapping=True,
        exports=(
            ExportSpec(
                name="fused",
                description="A server of another package.",
                factory="fused_format:FusedFormat",
                reader="fused_format:read_fused",
                counting="layer_output",
            ),
        ),
    )
)
