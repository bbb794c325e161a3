"""Options of a draft's layers: shapes that cannot be built are refused before the capture."""

from __future__ import annotations

import pytest

from draftworks.config.draft_options import LayerOptions
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.errors import ConfigError

OF_LAYERS = [name for name in list_strategies() if issubclass(resolve_strategy(name).options, LayerOptions)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize("strategy", OF_LAYERS)
def test_options_that_are_left_to_the_target_are_no_part_of_the_identity(strategy):
    options = resolve_strategy(strategy).options
    assert not {"head_dim", "rms_norm_eps", "rope"} & options().to_identity().keys()
    assert options(head_dim=64, rope=YARN).to_identity() == {**options().to_identity(), "head_dim": 64, "rope": YARN}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_theta": 1e4}, "rope_type: expected one of default, linear, llama3, yarn, found None"),
        ({"rope_type": "dynamic", "rope_theta": 1e4}, "rope_type: expected one of .*found 'dynamic'"),
        ({"rope_type": "default", "rope_theta": "x"}, "rope of type default: expected a number above 0 as rope_theta"),
        ({"rope_type": "default", "rope_theta": -3}, "expected a number above 0 as rope_theta"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "rope of type linear: expected a number above 0 as factor"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}, "low_freq_factor and high_freq_factor and original"),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", OF_LAYERS)
def test_a_rope_that_no_draft_computes_is_refused(strategy, rope, message):
    with pytest.raises(ConfigError, match=f"small: rope: .*{message}"):
        resolve_strategy(strategy).parse_options({"rope": rope}, where="small")
