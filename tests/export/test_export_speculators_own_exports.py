"""The real speculators library loads our exports and computes the same; what it saves can be imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from export_toys import CASES, assert_same_draft
from export_toys import Case as Exporting
from speculators_judge import Case, Findings, Question
from torch import Tensor

from draftworks.drafts.anchors import place_blocks
from draftworks.drafts.objectives import LossSettings
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft
from draftworks.strategies.dflash.model import LabelledBlocks

pytestmark = pytest.mark.speculators

EXPORTS = [case for case in CASES if case.format.startswith("speculators_")]
ROWS = 9
ENDS = ("eager", "sdpa")


@dataclass(frozen=True)
class Exported:
    """A draft exported in fp32 and in bf16, and what our drafter proposed after `question`."""

    draft: CanonicalDraft
    fp32: Path
    bf16: Path
    question: Question
    probabilities: Tensor
    draft_ids: Tensor

    @property
    def saved(self) -> Path:
        """Where the library saves what it made of the fp32 one."""
        return self.fp32.with_name("saved")


def exported(case: Exporting, folder: Path) -> Exported:
    toys = case.toys(folder)
    draft = toys.draft(case.strategy, **case.options)
    paths = {dtype: toys.folder / dtype for dtype in ("float32", "bfloat16")}
    for dtype, path in paths.items():
        assert export_draft(draft, case.format, path, dtype).passed
    strategy = draft.build_strategy()
    generator = torch.Generator().manual_seed(1)
    features = [torch.randn(ROWS, draft.parts.hidden_size, generator=generator) for _ in draft.taps]
    tokens = torch.randint(draft.parts.vocab_size, (ROWS,), generator=generator)
    drafter = strategy.drafter()
    drafter.extend(dict(zip((tap.name for tap in draft.taps), features, strict=True)), tokens)
    proposal = drafter.propose(strategy.draft_tokens, temperature=1.0, generator=generator)
    question = Question(torch.cat(features, dim=-1), tokens, proposal.tokens)
    ids = said_by(strategy, draft.parts.vocab_size)
    return Exported(draft, paths["float32"], paths["bfloat16"], question, proposal.probabilities, ids)


def said_by(strategy: DraftStrategy, vocab: int) -> Tensor:
    """The target's ids of the columns of the draft's logits."""
    return getattr(strategy.model, "draft_ids", torch.arange(vocab))


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Exported]:
    return {str(case): exported(case, tmp_path_factory.mktemp("export")) for case in EXPORTS}


@pytest.fixture(scope="module")
def findings(speculators_judge, exports) -> dict[str, Findings]:
    cases = []
    for name, one in exports.items():
        cases += [Case(f"{name}-{end}", one.fp32, one.question, end) for end in ENDS]
        cases += [Case(f"{name}-bf16", one.bf16), Case(f"{name}-saved", one.fp32, saved=one.saved)]
    return speculators_judge(cases)


@pytest.mark.parametrize("name", [str(case) for case in EXPORTS])
def test_the_library_holds_exactly_what_we_wrote(name, findings):
    for kind in (*ENDS, "bf16"):
        assert findings[f"{name}-{kind}"].faithful, findings[f"{name}-{kind}"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", [str(case) for case in EXPORTS])
def test_the_library_computes_what_our_drafter_proposes(name, end, exports, findings):
    ours = exports[name].probabilities[:, exports[name].draft_ids]
    theirs = findings[f"{name}-{end}"].logits.log_softmax(-1)
    torch.testing.assert_close(ours.log(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [str(case) for case in EXPORTS if case.strategy == "dflash2"])
def test_the_library_and_our_training_have_the_same_loss_of_the_backbone_and_of_the_selector(name, exports, findings):
    one = exports[name]
    strategy, question, labels = one.draft.build_strategy(), one.question, one.question.drawn[None, None]
    after = question.features.new_zeros(1 + labels.shape[-1], question.features.shape[1])
    rows = LabelledBlocks(
        torch.cat([question.next_tokens[:1], question.next_tokens, question.drawn])[None],
        torch.cat([question.features, after])[None],
        None,
        place_blocks(torch.arange(ROWS + len(after))[None] == ROWS, strategy.options.block_size),
        labels,
        torch.ones_like(labels, dtype=torch.bool),
    )
    options = strategy.options.model_copy(update={"gamma": 4.0, "selector_loss_alpha": 0.5})
    result = strategy.model(rows, LossSettings(StepContext(training=True), options))
    unary, selector = findings[f"{name}-eager"].losses
    # The library divides by the number of labels, and 1e-5.
    torch.testing.assert_close(result.loss, (unary + 0.5 * selector) * (labels.numel() + 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [str(case) for case in EXPORTS])
def test_what_the_library_saves_is_imported_as_the_draft_it_is(name, exports, findings, tmp_path):
    assert findings[f"{name}-saved"].loads
    draft = exports[name].draft
    import_draft(exports[name].saved, draft.target, tmp_path / "imported")
    found = CanonicalDraft.load(tmp_path / "imported", draft.target)
    assert_same_draft(found, draft)
    assert found.options.select_structural() == draft.options.select_structural()
