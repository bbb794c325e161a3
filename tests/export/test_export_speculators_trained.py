"""A draft that `speculators train` makes by its defaults is imported, computes the same, and is exported unchanged."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators_judge import Case, Question
from torch import Tensor

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.export.canonical import WEIGHTS, CanonicalDraft
from draftworks.export.exporting import export_draft
from draftworks.export.gates import open_export
from draftworks.export.importing import import_draft

pytestmark = pytest.mark.speculators

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 6
"""Shorter than the nine positions of the question, so that it hides some."""
FLAGS = ["--speculator-type", "eagle3", "--draft-vocab-size", "100", "--total-seq-len", "80"]


class Journey(NamedTuple):
    """A checkpoint of the library, its import, the export of that, and the library's findings on first and last."""

    trained: Path
    draft: CanonicalDraft
    options: dict[str, Any]
    again: Path
    findings: dict[str, Any]


@pytest.fixture(scope="module")
def journey(tmp_path_factory, speculators_judge, tiny_folder, tiny_target, tiny_tensors, question) -> Journey:
    folder = tmp_path_factory.mktemp("trained")
    python, script = ROOT / ".venv-speculators" / "bin" / "python", ROOT / "tools" / "speculators_train.py"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [python, script, tiny_folder, folder, *FLAGS, "--sliding-window", str(WINDOW)]
    done = subprocess.run(map(str, command), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    trained = folder / "checkpoints" / "checkpoint_best"
    imported = import_draft(trained, tiny_target, folder / "imported")
    draft = CanonicalDraft.load(imported.folder, tiny_target)
    again = export_draft(draft, "speculators_eagle3", folder / "again", "float32")
    assert again.passed, again.gates
    shared = with_embedding(trained, tiny_tensors.embedding, folder / "shared")
    cases = [Case("trained", shared, question), Case("again", again.path, question)]
    return Journey(trained, draft, imported.options, again.path, speculators_judge(cases))


def with_embedding(trained: Path, embedding: Tensor, folder: Path) -> Path:
    """The library rounds what it saves to bfloat16, its copy of the target's embedding too. Servers share the target's own."""
    folder.mkdir()
    tensors = load_file(trained / WEIGHTS) | {"embed_tokens.weight": embedding}
    save_file(
        {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}, folder / WEIGHTS
    )
    config = json.loads((trained / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def unroll_draft(draft: CanonicalDraft, question: Question) -> Tensor:
    """Return the training form's logits (k, V_d) for the chain after the question's last position, on the drawn tokens."""
    strategy, rows, steps = draft.build_strategy(), len(question.features), len(question.drawn)
    tokens = torch.cat([question.next_tokens[:1], question.next_tokens, question.drawn])[None]
    padding = question.features.new_zeros(tokens.shape[1] - rows, question.features.shape[1])
    here = (torch.arange(tokens.shape[1]) == rows - 1)[None]
    documents = Documents.from_lengths((tokens.shape[1],))
    features = torch.cat([question.features, padding])[None]
    with torch.no_grad():
        states = strategy.model.unroll(tokens, features, steps, ActivePositions.where(here), documents)
        return torch.cat([strategy.model.lm_head(state) for state in states])


def test_the_librarys_defaults_are_options_here(journey: Journey):
    expected = {"norm_before_fc": True, "norm_before_residual": True, "feedback": "post_norm", "fc_norm": False}
    expected |= {"sliding_window": WINDOW, "draft_vocab_size": 100, "layer_ids": None}
    assert {name: journey.options[name] for name in expected} == expected
    assert not torch.equal(journey.draft.weights["input_norm.weight"], torch.ones(384)), "the training moved nothing"


def test_logits_are_those_of_the_library(journey: Journey, question: Question):
    ours, theirs = unroll_draft(journey.draft, question), journey.findings["trained"].logits
    assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


def test_it_goes_back_as_the_library_would_have_written_it(journey: Journey, question: Question, tiny_tensors):
    assert journey.findings["again"].faithful, journey.findings["again"]
    torch.testing.assert_close(journey.findings["again"].logits, journey.findings["trained"].logits, rtol=0, atol=0)
    said, written = (json.loads((folder / "config.json").read_text()) for folder in (journey.again, journey.trained))
    keys = ["norm_before_fc", "norm_before_residual", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids"]
    assert {key: said[key] for key in keys} == {key: written[key] for key in keys}
    window = ["layer_types", "sliding_window", "use_sliding_window"]
    layers = [config["transformer_layer_config"] for config in (said, written)]
    assert [layers[0][key] for key in window] == [layers[1][key] for key in window]
    tensors = load_file(journey.trained / WEIGHTS)
    for name, tensor in load_file(journey.again / WEIGHTS).items():
        assert torch.equal(tensor.to(tensors[name].dtype), tensors[name]), name
    reader = open_export("speculators_eagle3", journey.again, tiny_tensors)
    ours = reader.logits(question.features, question.next_tokens, question.drawn)
    torch.testing.assert_close(ours.float(), journey.findings["again"].logits, rtol=1e-5, atol=1e-4)
