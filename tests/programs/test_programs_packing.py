"""Training with `pack_tokens`: the same draft with the same metrics, and clear errors before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_run_files import DFLASH_OPTIONS, OPTIONS, TRAINING, RunFiles

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, DataError
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

PACKED = TRAINING.model_copy(update={"pack_tokens": 48})


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def trained(files: RunFiles, training: TrainingSpec, **changes) -> dict:
    out = files.folder / f"draft-{training.pack_tokens}"
    return train(files.train_run(out=out, training=training, **changes), ProgramContext())


@pytest.mark.parametrize("strategy", ["eagle3", "dflash"])
def test_packing_gives_the_same_draft_to_rounding(files: RunFiles, strategy: str, capsys) -> None:
    changes = {"strategy": "dflash", "options": DFLASH_OPTIONS, "vocab_mapping": None} if strategy == "dflash" else {}
    padded, packed = (trained(files, training, **changes) for training in (TRAINING, PACKED))
    assert (packed["steps"], packed["tokens"]) == (padded["steps"], padded["tokens"])
    assert packed["last_loss"] == pytest.approx(padded["last_loss"], rel=1e-4)
    assert packed["heldout"]["eval/avg_loss"] == pytest.approx(padded["heldout"]["eval/avg_loss"], rel=1e-4)
    assert packed["heldout"]["eval/supervised_tokens"] == padded["heldout"]["eval/supervised_tokens"]
    assert "in packed rows of at most 48 tokens" in capsys.readouterr().out


def test_a_sample_longer_than_the_row_is_refused_by_name_before_training(files: RunFiles, capsys) -> None:
    short = TRAINING.model_copy(update={"pack_tokens": 12})
    with pytest.raises(
        DataError, match=r"samples do not fit into a row of pack_tokens 12; the longest is train\d with 2\d"
    ):
        trained(files, short)
    assert "step=" not in capsys.readouterr().out
    own_row = short.model_copy(update={"pack_overlong": "own_row"})
    assert trained(files, own_row)["steps"] == 8


def test_a_loss_that_is_made_of_padding_is_refused(files: RunFiles) -> None:
    with pytest.raises(ConfigError, match=r"pack_tokens is set, but eagle3 with loss: specforge takes means"):
        trained(files, PACKED, options={**OPTIONS, "loss": "specforge"})
