"""Packing as a training option: it only divides the global batch, and is refused for strategies without it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftworks.config.registry_files import StrategyEntry, TargetSpec, TrainingSpec
from draftworks.config.strategies import StrategyOptions, StrategySpec, resolve_strategy
from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_requirements
from draftworks.storage.identity import LayerTap
from draftworks.targets.registry import Registry


def test_packing_is_no_identity():
    padded = TrainingSpec(global_batch_size=8, micro_batch_size=4)
    packed = TrainingSpec(global_batch_size=8, pack_tokens=1024, pack_overlong="own_row", processes=3)
    assert packed.to_identity() == padded.to_identity()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch_size": 2, "processes": 3, "pack_tokens": 64}, "2 leaves some of 3 processes without a sample"),
        ({"pack_overlong": "own_row"}, "pack_overlong own_row has no effect without pack_tokens"),
        ({"pack_tokens": 1}, "greater than or equal to 2"),
        ({"pack_tokens": 64, "pack_overlong": "cut"}, "'refuse' or 'own_row'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        TrainingSpec(**values)


def test_a_loss_that_is_made_of_padding_is_refused_before_any_cost(tmp_path, tiny_target):
    options = {"draft_vocab_size": 64, "loss": "specforge"}
    entry = StrategyEntry(options=options, training=TrainingSpec(pack_tokens=64))
    target = TargetSpec(name="small", model="m", dataset="d", max_length=32, strategies={"eagle3": entry})
    with pytest.raises(ConfigError, match=r"strategies\.eagle3\.training: pack_tokens is set, but eagle3 with loss"):
        check_requirements(target, tiny_target, Registry(tmp_path))


def test_a_strategy_that_does_not_say_it_packs_is_refused():
    plain = StrategySpec("plain", "", StrategyOptions, lambda layers, options: (LayerTap(1),), "nowhere:none")
    with pytest.raises(ConfigError, match="here: pack_tokens is set, but plain does not support packed samples"):
        plain.check_packing(StrategyOptions(), "here")
    for name in ("eagle3", "dflash"):
        spec = resolve_strategy(name)
        spec.check_packing(spec.parse_options({}, "here"), "here")
