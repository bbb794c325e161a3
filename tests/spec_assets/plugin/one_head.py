"""A minimal strategy of another package: one matrix over one tap and the last token predicts the next token."""

from __future__ import annotations

from pydantic import Field

from draftworks.config.draft_options import parse_taps
from draftworks.strategies import StrategyOptions, StrategySpec, register_strategy


class OneHeadOptions(StrategyOptions):
    layer_id: int = Field(default=4, description="The tap, as hf_index.")


register_strategy(
    StrategySpec(
        name="one_head",
        description="One matrix.",
        options=OneHeadOptions,
        taps=lambda layers, options: parse_taps("one_head", [options.layer_id], [], layers, 1),
        factory="one_head_draft:OneHeadStrategy",
        uses_last_hidden=False,
    )
)
