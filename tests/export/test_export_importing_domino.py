"""Imports of Domino drafts: the projector's keys may be in either place; an incomplete projector is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_toys import Toys, assert_same_draft
from test_export_importing import Config, Tensors, changed, nothing

from draftworks.errors import ConfigError, DraftworksError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """A target, a draft of it, and its export in fp32."""
    made = Toys.make(tmp_path_factory.mktemp("importing"))
    export_draft(made.draft("domino"), "zlab_domino", made.folder / "zlab_domino", "float32")
    return made


def projector(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config["dflash_config"].update(values)


def beside_dflash_config(config: Config) -> None:
    for key in ("projector_type", "shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"):
        config[key] = config["dflash_config"].pop(key)


def specforges_class(config: Config) -> None:
    config["architectures"] = ["DominoDraftModel"]
    config["emb_dim"] = config["dflash_config"]["emb_dim"]
    del config["dflash_config"]["projector_type"]


def below_model(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


@pytest.mark.parametrize("config", [beside_dflash_config, specforges_class])
def test_a_draft_of_another_trainer_is_the_same_here(toys: Toys, tmp_path: Path, config: Callable[[Config], None]):
    source = changed(toys.folder / "zlab_domino", tmp_path / "foreign", below_model, config)
    imported = import_draft(source, toys.target, tmp_path / "imported")
    expected, found = (CanonicalDraft.load(folder, toys.target) for folder in (toys.folder / "draft", imported.folder))
    assert_same_draft(found, expected)
    assert imported.strategy == "domino"
    assert found.options.select_structural() == expected.options.select_structural()


REFUSED: dict[str, tuple[Callable[[Tensors], Any], Callable[[Config], Any], str]] = {
    "part of a projector": (nothing, projector(shift_label=None), "dflash_config: key shift_label is missing"),
    "two projectors": (nothing, lambda c: c.update(emb_dim=9), "emb_dim 6, but 9 beside dflash_config"),
    "nothing corrected": (nothing, projector(pure_draft_prefix_len=4), "pure_draft_prefix_len 4 leaves none"),
    "more than Domino": (nothing, lambda c: c.update(markov_rank=8), "markov_rank: a draft of another strategy"),
    "no GRU": (
        lambda t: t.pop("prefix_gru.weight_hh_l0"),
        nothing,
        r"missing tensors: correction\.prefix_gru\.weight_hh_l0",
    ),
    "GRU of another size": (nothing, projector(gru_hidden_dim=7), r"prefix_gru\.weight_ih_l0: expected \(21, 16\)"),
    "a bias": (
        lambda t: t.update({"embed_proj.0.bias": t["norm.weight"].clone()}),
        nothing,
        r"unknown tensors: correction\.embed_proj\.0\.bias",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_draft_here_can_be_is_refused(toys: Toys, tmp_path: Path, name: str):
    tensors, config, message = REFUSED[name]
    source = changed(toys.folder / "zlab_domino", tmp_path / "foreign", tensors, config)
    with pytest.raises(DraftworksError, match=message) as caught:
        import_draft(source, toys.target, tmp_path / "imported")
    assert str(source) in str(caught.value)
    assert not (tmp_path / "imported").exists()


def test_a_draft_that_no_server_takes_can_still_be_imported(toys: Toys, tmp_path: Path):
    source = changed(toys.folder / "zlab_domino", tmp_path / "foreign", config=projector(pure_draft_prefix_len=0))
    imported = import_draft(source, toys.target, tmp_path / "imported")
    assert imported.options["pure_draft_prefix_len"] == 0
    with pytest.raises(ConfigError, match="pure_draft_prefix_len 0"):
        export_draft(CanonicalDraft.load(imported.folder, toys.target), "zlab_domino", tmp_path / "exported")
