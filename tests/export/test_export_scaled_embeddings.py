"""Targets that scale their embeddings: formats whose servers look up unscaled ones are refused for block drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_toys import Toys

from draftworks.errors import ConfigError
from draftworks.export.exporting import choose_formats, export_draft
from draftworks.export.gates import compare_with_reader
from draftworks.export.importing import import_draft

BLOCKS = {"dflash": "zlab_dflash", "dflash2": "zlab_dflash2", "domino": "zlab_domino", "dspark": "zlab_dspark"}


@pytest.fixture
def gemma(tmp_path: Path) -> Toys:
    return Toys.make(tmp_path / "gemma", tied=True, model_type="gemma")


@pytest.mark.parametrize("strategy", BLOCKS)
def test_an_independent_reader_with_the_servers_embeddings_computes_the_same(gemma: Toys, strategy: str):
    draft = gemma.draft(strategy)
    assert draft.parts.embedding_scale == 4.0
    result = export_draft(draft, BLOCKS[strategy], gemma.folder / "out", "float32")
    assert result.passed
    bare = replace(draft, parts=replace(draft.parts, embedding_scale=1.0))
    found = compare_with_reader(gemma.folder / "out", BLOCKS[strategy], bare, draft.build_strategy(), torch.float32)
    assert found.largest > 0.1


@pytest.mark.parametrize("strategy", ["dflash", "dflash2", "dspark"])
def test_formats_whose_loaders_look_up_unscaled_embeddings_are_left_out(gemma: Toys, strategy: str):
    choice = choose_formats(gemma.draft(strategy))
    assert choice.chosen == (BLOCKS[strategy],)
    assert choice.refused == {
        f"speculators_{strategy}": "the target multiplies its embeddings by 4, which this format's loaders do not do"
    }


def test_eagle3_reads_unscaled_embeddings_as_its_servers_do(gemma: Toys):
    assert len(choose_formats(gemma.draft("eagle3")).chosen) == 2
    assert export_draft(gemma.draft("eagle3"), "sglang_eagle3", gemma.folder / "out", "float32").passed


def test_a_draft_that_was_trained_on_unscaled_embeddings_does_not_come_in(gemma: Toys, tmp_path: Path):
    plain = Toys.make(tmp_path / "plain", tied=True)
    export_draft(plain.draft("dflash"), "speculators_dflash", tmp_path / "peer", "float32")
    import_draft(tmp_path / "peer", plain.target, tmp_path / "fits")
    with pytest.raises(
        ConfigError, match=r"multiplies its embeddings by 4.* trained on other embeddings than drafts here read"
    ):
        import_draft(tmp_path / "peer", gemma.target, tmp_path / "imported")
