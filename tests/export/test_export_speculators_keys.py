"""Keys and command line arguments that vLLM needs because it does not derive them from the draft."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from export_toys import FORMATS, Toys

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.export.config_keys import read_proposed_tokens
from draftworks.export.export_format import load_format
from draftworks.export.exporting import export_draft

READ_BY_VLLM = {"eagle3", "peagle", "dflash", "dflash2", "dspark"}
"""`SUPPORTED_SPECULATORS_TYPES` of 0.32.0 and 0.33.0."""
OF_OTHERS = {"zlab_dflash", "zlab_dflash2", "zlab_dspark", "sglang_lilicorr", "target_mtp", "vllm_xpress"}
"""Formats of others that vLLM has a class for; one of them, Domino's, it would load as DFlash."""
EAGLES = ["speculators_eagle3", "speculators_peagle"]


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    return Toys.make(tmp_path)


def on_hub(toys: Toys) -> TargetFiles:
    return toys.target.model_copy(update={"model": "acme/small", "revision": "0" * 40})


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
        ("zlab_dflash2", {"method": "dflash", "num_speculative_tokens": 3}),
        ("zlab_dspark", {"method": "dspark", "num_speculative_tokens": 4}),
        ("vllm_xpress", {"method": "dflash", "num_speculative_tokens": 3}),
    ],
)
def test_the_command_says_how_the_draft_proposes(toys: Toys, name: str, said: dict[str, Any]):
    result = export_draft(toys.draft(FORMATS[name]), name, toys.folder / "out")
    words = shlex.split(result.commands["vLLM from 0.33 on" if name == "vllm_xpress" else "vLLM, target first"])
    assert words[:3] == ["vllm", "serve", toys.target.model]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"model": "DRAFT_FOLDER", **said}


def list_commands(toys: Toys, name: str, target: TargetFiles) -> dict[str, str]:
    draft = replace(toys.draft(FORMATS[name]), target=target)
    return load_format(draft.record.strategy, name).build_serve_commands(draft, "DRAFT_FOLDER")


def test_vllm_is_not_left_to_find_out_what_p_eagle_is(toys: Toys):
    found = {name: list_commands(toys, name, on_hub(toys)) for name in EAGLES}
    assert list(found["speculators_peagle"]) == ["vLLM, target first"]
    assert list(found["speculators_eagle3"]) == ["vLLM", "vLLM, target first"]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_no_command_is_given_that_vllm_refuses(toys: Toys, name: str, local: bool):
    """By what 0.33.0 does: a folder alone has to name a target on the hub, and a type that it has a reader for."""
    target = toys.target if local else on_hub(toys)
    commands = {server: command for server, command in list_commands(toys, name, target).items() if "vllm" in command}
    for words in map(shlex.split, commands.values()):
        assert words[:2] == ["vllm", "serve"]
        assert words[2] == target.model or (words[2:] == ["DRAFT_FOLDER"] and not local)
    kind = name.removeprefix("speculators_")
    assert not commands or (kind in READ_BY_VLLM if kind != name else name in OF_OTHERS)


def test_a_target_in_a_folder_is_given_first(toys: Toys):
    assert list(list_commands(toys, "speculators_dflash", toys.target)) == ["vLLM, target first"]
    assert list(list_commands(toys, "speculators_dflash", on_hub(toys))) == ["vLLM", "vLLM, target first"]


def test_the_readme_says_in_which_form_vllm_reads_xpress(toys: Toys):
    result = export_draft(toys.draft("xpress"), "speculators_xpress", toys.folder / "out")
    assert result.commands == {}
    serving = (toys.folder / "out" / "README.md").read_text().partition("## Serving")[2]
    assert "vllm serve" not in serving
    assert "Not vLLM: 0.32 and 0.33 refuse" in serving


@pytest.mark.parametrize("name", ["zlab_dflash2", "speculators_dflash2", "sglang_lilicorr"])
def test_the_readme_says_how_many_tokens_vllm_is_to_be_asked_for(toys: Toys, name: str):
    """Its convolutions take 1 + num_speculative_tokens as the block, which is 4 here."""
    loaders = export_draft(toys.draft(FORMATS[name]), name, toys.folder / "out").loaders
    assert "ask for 3" in loaders or "3 tokens" in loaders


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
