"""Layer ids by format: the table of conventions for a target of 36 layers, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.errors import ConfigError
from draftworks.export.layer_ids import from_format, to_format
from draftworks.storage.identity import LayerTap

EAGLE3 = [LayerTap(2), LayerTap(18), LayerTap(33)]
DFLASH = [LayerTap(2), LayerTap(10), LayerTap(18), LayerTap(26), LayerTap(34)]

TABLE = [
    ("speculators_eagle3", EAGLE3, [2, 18, 33]),  # vLLM's own default for 36 layers: [2, n // 2, n - 3]
    ("speculators_peagle", EAGLE3, [2, 18, 33]),
    ("sglang_eagle3", EAGLE3, [1, 17, 32]),  # SpecForge's default: [1, n // 2 - 1, n - 4]
    ("speculators_dflash", DFLASH, [2, 10, 18, 26, 34]),
    ("zlab_dflash", DFLASH, [1, 9, 17, 25, 33]),  # as in the published draft for Qwen3-8B
    ("zlab_dflash2", DFLASH, [1, 9, 17, 25, 33]),
    ("speculators_dflash2", DFLASH, [2, 10, 18, 26, 34]),
    ("zlab_domino", DFLASH, [1, 9, 17, 25, 33]),
    ("zlab_dspark", DFLASH, [1, 9, 17, 25, 33]),  # as in the published recipes for Qwen3-4B
    ("speculators_dspark", DFLASH, [2, 10, 18, 26, 34]),
    ("speculators_xpress", DFLASH, [2, 10, 18, 26, 34]),
    ("sglang_lilicorr", DFLASH, [1, 9, 17, 25, 33]),
]


@pytest.mark.parametrize(("export_format", "taps", "ids"), TABLE)
def test_ids_are_those_of_the_published_drafts_for_36_layers(export_format, taps, ids):
    assert to_format(export_format, taps) == ids
    assert from_format(export_format, ids) == tuple(taps)


FORMATS = [spec.name for name in list_strategies() if name != "mtp" for spec in resolve_strategy(name).exports]
"""MTP's name no layers."""


@pytest.mark.parametrize("export_format", FORMATS)
def test_ids_lead_back_to_the_layers_in_every_format(export_format):
    assert from_format(export_format, to_format(export_format, EAGLE3)) == tuple(EAGLE3)


@pytest.mark.parametrize("export_format", [row[0] for row in TABLE])
@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 4], [1, True], [1.0, 2]])
def test_ids_that_do_not_name_columns_of_fc_are_refused(export_format, ids):
    with pytest.raises(ConfigError, match="expected ascending integers"):
        from_format(export_format, ids)


@pytest.mark.parametrize("export_format", ["sglang_eagle3", "zlab_dflash"])
def test_the_embeddings_have_no_id_where_layers_are_counted_by_their_output(export_format):
    with pytest.raises(ConfigError, match=r"found \[-1, 4\]"):
        to_format(export_format, [LayerTap(0), LayerTap(5)])


def test_an_unknown_format_is_answered_with_the_closest_ones():
    with pytest.raises(ConfigError, match="did you mean zlab_dflash"):
        to_format("z-lab_dflash", EAGLE3)


def test_layer_ids_need_no_torch():
    code = "import sys, draftworks.export.layer_ids; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
