"""Keys and command line arguments that vLLM needs because it does not derive them from the draft."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from export_toys import FORMATS, Toys

from draftworks.errors import ConfigError
from draftworks.export.exporting import export_draft
from draftworks.export.speculators_keys import read_proposed_tokens

EAGLES = ["speculators_eagle3", "speculators_peagle"]


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    return Toys.make(tmp_path)


def layers_of(toys: Toys, name: str, **options: Any) -> dict[str, Any]:
    """The section of config.json from which vLLM builds its own configuration of the layers."""
    export_draft(toys.draft(FORMATS[name], **options), name, toys.folder / "out")
    return json.loads((toys.folder / "out" / "config.json").read_text())["transformer_layer_config"]


@pytest.mark.parametrize("name", EAGLES)
def test_taps_are_counted_for_vllm_unless_they_are_three(toys: Toys, name: str):
    assert layers_of(toys, name, layer_ids=[1, 3, 4, 6])["num_aux_hidden_states"] == 4
    assert "num_aux_hidden_states" not in layers_of(toys, name)


def test_the_norms_of_p_eagles_taps_are_said_where_vllm_reads_them(toys: Toys):
    assert layers_of(toys, "speculators_peagle", fc_norm=True)["fc_norm"] is True
    assert "fc_norm" not in layers_of(toys, "speculators_peagle")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("speculators_eagle3", {"method": "eagle3", "num_speculative_tokens": 3}),
        ("speculators_peagle", {"method": "eagle3", "num_speculative_tokens": 3, "parallel_drafting": True}),
        ("speculators_dflash", {"method": "dflash", "num_speculative_tokens": 3}),
    ],
)
def test_the_command_says_how_the_draft_proposes(toys: Toys, name: str, said: dict[str, Any]):
    result = export_draft(toys.draft(FORMATS[name]), name, toys.folder / "out")
    words = shlex.split(result.commands["vLLM, target first"])
    assert words[:3] == ["vllm", "serve", toys.target.model]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"model": "DRAFT_FOLDER", **said}


def test_vllm_is_not_left_to_find_out_what_p_eagle_is(toys: Toys):
    found = {name: export_draft(toys.draft(FORMATS[name]), name, toys.folder / name).commands for name in EAGLES}
    assert list(found["speculators_peagle"]) == ["vLLM, target first"]
    assert list(found["speculators_eagle3"]) == ["vLLM", "vLLM, target first"]


def test_no_command_of_sglang_is_given_for_p_eagle(toys: Toys):
    result = export_draft(toys.draft("peagle"), "speculators_peagle", toys.folder / "out")
    assert "SGLang" not in result.commands
    assert "SGLang 0.5.23 has no P-EAGLE" in (toys.folder / "out" / "README.md").read_text()


@pytest.mark.parametrize("config", [{}, {"proposal_methods": []}, {"proposal_methods": [{"speculative_tokens": "8"}]}])
def test_a_number_of_proposals_that_is_none_is_an_error(config: dict[str, Any]):
    with pytest.raises(
        ConfigError, match=r"here: speculators_config\.proposal_methods: expected a method with its number"
    ):
        read_proposed_tokens({"speculators_config": config}, "here")
