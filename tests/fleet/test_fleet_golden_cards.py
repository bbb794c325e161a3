"""Every sentence that a model card can say, as it is published: a rename that goes through text changes one of them.

Where a change is meant, write the cards again and read the difference before it is committed:

    python -m pytest tests/fleet/test_fleet_golden_cards.py -vv
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from model_card_toys import DATASET, DRAFT, LOCAL, REPORT, SCORES, TARGET
from own_names import find_own_names

from draftworks.config.decoding import Decoding
from draftworks.evaluation.labels import LabelCounts
from draftworks.evaluation.ladder.rungs import RUNG_MEANINGS
from draftworks.evaluation.report.summary import RungScore
from draftworks.fleet import model_card as module
from draftworks.fleet.model_card import CardSubject, model_card

GOLDEN = Path(__file__).with_name("golden_cards")
WHOLE = {**DRAFT.identity, "options": {"draft_vocab_size": TARGET.vocab_size}, "vocab_mapping": "mapping-version"}
BLOCKS = RungScore("trained", 2, "rung2_block_acc_len", 2.6, None, 2.4, 2.8, 0.95, 40, 900, 3.6)
SAMPLED = RungScore(
    *("trained", 4, "rung4_loop_acc_len_t0.7_greedy_draft", 1.9, 0.7, 1.7, 2.1, 0.95, 7, 55, 2.9, 1.3),
    decoding=Decoding(0.7, "greedy_draft"),
    servers="vLLM 0.33, SGLang 0.5.23",
)
OLD = RungScore("trained", 1, "simulated_acc_len_t0.7", 2.2, 0.7, decoding=Decoding(0.7, "rejection"))
ROUNDED = replace(
    REPORT,
    label_agreement=0.998,
    labels=LabelCounts(1000, 2, 2),
    greedy_answers=True,
    scores=(*SCORES, BLOCKS, SAMPLED),
)
ONE_PROMPT = replace(REPORT, eval_set="code", label_agreement=None, scores=(replace(SCORES[13], prompts=1), SCORES[12]))
SUBJECTS = {
    "hub": CardSubject(DRAFT, [REPORT], TARGET, DATASET),
    "rounded": CardSubject(DRAFT, [ROUNDED], TARGET, DATASET),
    "stale_local": CardSubject(
        replace(DRAFT, identity=WHOLE),
        [
            ROUNDED,
            ONE_PROMPT,
            replace(ROUNDED, eval_set="math", label_agreement=0.7, greedy_answers=False, scores=(SCORES[12], OLD)),
        ],
        LOCAL,
        DATASET.model_copy(update={"licence": None, "description": "Chats of a shop."}),
        changes=["weights of the target (since 2026-05-02)", "training data"],
    ),
}
"""With and without: a hub id, changes, several eval sets, one prompt, no passes, a reduced vocabulary, a loop, labels that are
the target's own, nearly, not, or not checked."""


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_card_is_what_it_was(name: str):
    assert model_card(SUBJECTS[name]) == (GOLDEN / f"{name}.md").read_text(encoding="utf-8")


def test_every_sentence_of_the_module_stands_in_a_golden_card():
    cards = "".join(path.read_text(encoding="utf-8") for path in GOLDEN.iterdir())
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    texts = [text.strip() for text in said if isinstance(text, str) and "%" not in text]
    sentences = [*(text for text in texts if len(re.findall(r"\w+", text)) > 2), *RUNG_MEANINGS.values()]
    assert len(sentences) > 20
    assert [text for text in sentences if text not in cards] == []


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_name_of_the_code_stands_as_a_word(name: str):
    assert find_own_names(model_card(SUBJECTS[name])) == set()
