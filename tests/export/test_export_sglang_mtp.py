"""The classes that SGLang takes for MTP layers load our exports, and compute the probabilities of the reader of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judge_process import PeerJudge
from mtp_toys import HIDDEN, VOCAB, save_tuned
from safetensors.torch import save_file

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.export.exporting import export_draft
from draftworks.export.gates import open_export
from draftworks.export.readers.reader import TargetTensors

ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLMMTP",
    "qwen3_5_text": "Qwen3_5ForCausalLMMTP",
    "qwen3_5_moe": "Qwen3_5ForCausalLMMTP",
}


def exported(target: TargetFiles, folder: Path) -> list[torch.Tensor]:
    """Exports a layer with questions beside it, and returns the reader's log probabilities, (k, V) for each."""
    export_draft(save_tuned(target, folder.with_name(f"draft-{folder.name}"), 0.01), "target_mtp", folder, "float32")
    write_rope_beside(folder / "config.json")
    parts, generator = TargetParts.load(target), torch.Generator().manual_seed(5)
    lent = TargetTensors(parts.embedding.float(), parts.head.float())
    reader = open_export("target_mtp", folder, lent, torch.float32)
    asked, answers = {"embedding": lent.embedding, "head": lent.head}, []
    for question, rows in enumerate((1, 2, 9)):
        last, ids = (
            torch.randn(rows, HIDDEN, generator=generator),
            torch.randint(VOCAB, (rows + 3,), generator=generator),
        )
        following, drawn = ids[:rows], ids[rows:]
        asked |= {f"last.{question}": last, f"following.{question}": following, f"drawn.{question}": drawn}
        answers.append(reader.log_probabilities({"last": last}, following, drawn))
    save_file({name: tensor.contiguous() for name, tensor in asked.items()}, folder.with_suffix(".safetensors"))
    return answers


def write_rope_beside(file: Path) -> None:
    """Write keys of the rope where SGLang looks for them, and where they are in published targets."""
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    text |= {key: text["rope_parameters"][key] for key in ("rope_theta", "partial_rotary_factor")}
    file.write_text(json.dumps(config))


@pytest.mark.sglang
def test_sglang_computes_what_the_reader_of_the_files_does(
    sglang_judge: PeerJudge, mtp_target: Callable[[str], TargetFiles], tmp_path: Path
):
    torch.set_num_threads(1)
    ours = {kind: exported(mtp_target(kind), tmp_path / kind) for kind in ARCHITECTURES}
    theirs = dict(zip(ours, sglang_judge.ask("mtp", [tmp_path / kind for kind in ours]), strict=True))
    assert {kind: found["architecture"] for kind, found in theirs.items()} == ARCHITECTURES
    found = [torch.tensor(rows) for kind in ours for rows in theirs[kind]["log_probabilities"]]
    expected = [rows.float() for answers in ours.values() for rows in answers]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
