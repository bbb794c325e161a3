"""Options of P-EAGLE: what is refused, before and without a target."""

from __future__ import annotations

import pytest
from draft_toys import HIDDEN, VOCAB
from pydantic import ValidationError

from draftworks.config.strategies import TargetSizes
from draftworks.errors import ConfigError
from draftworks.strategies.peagle.options import PEAGLE, PEagleOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_depths": 0}, "num_depths"),
        ({"down_sample_ratio": 0.0}, "down_sample_ratio"),
        ({"down_sample_ratio_min": 1.5}, "down_sample_ratio_min"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"ttt_length": 7}, "ttt_length"),
        ({"sliding_window": 7}, "sliding_window 7 is shorter than a chain of num_depths 8"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        PEagleOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": 40}, r"peagle: mask_token_id 40 is outside the target's vocabulary, 0\.\.39"),
        ({"num_depths": 32}, "peagle: num_depths 32 does not fit into samples of at most 32 tokens"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_target_are_refused_before_any_work(options, message):
    sizes = TargetSizes(num_layers=8, hidden_size=HIDDEN, vocab_size=VOCAB, max_length=32)
    with pytest.raises(ConfigError, match=message):
        PEAGLE.check(PEagleOptions(**options), sizes)


def test_taps_are_eagle3s_and_only_the_mean_over_micro_batches_cannot_be_packed():
    assert PEAGLE.list_features(12, PEagleOptions()) == ("hf2", "hf6", "hf9", "last")
    with pytest.raises(ConfigError, match="peagle: configured layer ids .*outside"):
        PEAGLE.taps(8, PEagleOptions(layer_ids=[2, 9]))
    PEAGLE.check_packing(PEagleOptions(), "here")
    with pytest.raises(ConfigError, match="peagle with loss: specforge takes means over micro-batches"):
        PEAGLE.check_packing(PEagleOptions(loss="specforge"), "here")
