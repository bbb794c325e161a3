"""A model card says what a draft is of, how it was made, and what it is worth, in the sentences that it was published with.

Where a change is meant, write the golden cards again and read the difference before it is committed:

    python -m pytest tests/fleet/test_fleet_model_card.py -vv
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from own_names import find_own_names

from draftworks.config.decoding import Decoding
from draftworks.config.registry_files import DatasetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.evaluation.acceptance_length import RUNG_MEANINGS
from draftworks.evaluation.labels import LabelCounts
from draftworks.evaluation.report.rival_verdict import RivalVerdict
from draftworks.evaluation.report.summary import ReportSummary, RungScore
from draftworks.fleet import model_card as module
from draftworks.fleet.model_card import CardSubject, model_card, strip_front_matter
from draftworks.storage.artifacts import Artifact

REVISION = "b968826d9c46dd6066d109eabc6255188de91218"
TARGET = TargetFiles(
    name="mine",
    model="Acme/Model-8B",
    revision=REVISION,
    tokenizer="Acme/Model-8B",
    digest="0123456789abcdef",
    tokenizer_digest="fedcba9876543210",
    num_layers=36,
    hidden_size=4096,
    vocab_size=2048,
    context=512,
)
LOCAL = TARGET.model_copy(update={"model": "/home/somebody/models/mine", "revision": None})
DRAFT = Artifact(
    asset="eagle3_draft",
    target="mine",
    path=Path("/var/eagle3_draft/mine/a9fe5ee3947bbcd8"),
    identity={
        "strategy": "eagle3",
        "options": {"ttt_length": 12, "draft_vocab_size": 1024, "layer_ids": None},
        "training": {"lr": 0.002, "seed": 42, "max_steps": None},
        "target": TARGET.digest,
        "tokens": "tokens-version",
        "features": "features-version",
        "vocab_mapping": None,
    },
    data_version="weights-version",
    summary={
        "steps": 1234,
        "published_step": 1200,
        "tokens": 56789,
        "world_size": 8,
        "first_loss": 9.5,
        "last_loss": 2.25,
        "heldout": {"eval/avg_acc": 0.9, "eval/tau": 1.5, "eval/confidence_error": [0.25, 0.125]},
    },
    files={},
    created=0.0,
    seconds=1.0,
)
SCORES = (
    *(RungScore("trained", 0, f"per_position_acc_{1 + i}", 0.9 - 0.05 * i) for i in range(12)),
    RungScore("trained", 1, "simulated_acc_len", 2.75),
    RungScore("trained", 3, "rung3_walk_acc_len", 2.5, None, 2.25, 2.85, 0.95, 40, 300, 3.5),
    RungScore("trained", 4, "rung4_loop_acc_len_t0", 2.4, 0.0, 2.1, 2.6, 0.95, 7, 50, 3.4, 1.62),
    RungScore("bigram", 1, "simulated_acc_len", 0.38),
)
REPORT = ReportSummary(
    target="mine",
    strategy="eagle3",
    eval_set="heldout",
    created=datetime(2026, 5, 4, tzinfo=UTC),
    weights_digest="weights-version",
    draft_tokens=12,
    label_agreement=1.0,
    scores=SCORES,
    provenance={"eval_tokens": "eval-tokens-digest"},
)
DATASET = DatasetSpec(name="chats", files=["chats.jsonl"], licence="CC BY 4.0 | attribution")

SUBJECT = CardSubject(DRAFT, [REPORT], TARGET, DATASET)
CARD = model_card(SUBJECT)


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def rows(card: str) -> list[list[str]]:
    """Cells of all tables."""
    lines = (line.replace("\\|", "/") for line in card.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def row(card: str, name: str) -> list[str]:
    return next(cells for cells in rows(card) if name in cells)


def test_the_same_lineage_gives_the_same_card():
    assert model_card(CardSubject(replace(DRAFT, hit=True), (REPORT,), TARGET, DATASET)) == CARD


def test_the_front_matter_is_what_the_hub_reads():
    found = front_matter(CARD)
    assert found["base_model"] == "Acme/Model-8B"
    assert {"speculative-decoding", "eagle3"} <= set(found["tags"])
    assert found["metrics"] == [
        "acceptance length τ, simulated (rung 1)",
        "acceptance length τ, walk (rung 3)",
        "acceptance length τ, loop (rung 4), at temperature 0",
    ]


def test_the_page_is_the_card_without_its_front_matter():
    assert strip_front_matter(CARD).startswith("# eagle3 draft of Acme/Model-8B\n")
    assert CARD.endswith(strip_front_matter(CARD))


def test_a_target_in_a_folder_is_named_and_its_place_is_not():
    card = model_card(replace(SUBJECT, target=LOCAL))
    assert "base_model" not in front_matter(card)
    assert "somebody" not in card
    assert row(card, "model")[1] == "mine"
    assert TARGET.digest in card


def test_every_score_is_there_with_its_interval():
    assert row(CARD, "τ, walk (rung 3)")[2] == "3.50 (3.25–3.85)"
    assert row(CARD, "τ, loop (rung 4), at temperature 0")[2] == "3.40 (3.10–3.60), 1.62× plain decoding"
    assert row(CARD, "τ, simulated (rung 1)")[2:] == ["3.75", "1.38"]
    accuracies = [cells[1] for cells in rows(CARD) if cells[0] == "0"]
    assert accuracies == [f"per position acc {position}" for position in range(1, 13)]


def test_what_only_the_strategy_counts_is_shown():
    assert row(CARD, "held-out sampled_acceptance_length")[1] == "2.50"
    assert row(CARD, "held-out confidence_error")[1] == "0.25, 0.12"
    assert "avg_acc" not in CARD


def test_every_measured_rung_is_explained_and_no_other():
    assert [rung for rung in range(5) if f"**Rung {rung}**" in CARD] == [0, 1, 3, 4]


def test_over_one_prompt_no_interval_is_shown():
    once = replace(REPORT, scores=tuple(replace(s, prompts=1) if s.rung == 3 else s for s in SCORES))
    assert row(model_card(replace(SUBJECT, reports=[once])), "τ, walk (rung 3)")[2] == "3.50"


def test_lineage_is_there():
    found = {cells[0]: cells[1] for cells in rows(CARD)}
    assert found["revision"] == REVISION
    assert found["licence of the data"] == "CC BY 4.0 / attribution"
    assert (found["steps"], found["tokens"], found["ranks"]) == ("1,234, published: step 1,200", "56,789", "8")
    digests = ("weights-version", "tokens-version", "features-version", "eval-tokens-digest", "a9fe5ee3947bbcd8")
    assert set(digests) <= set(found.values())


def test_every_eval_set_is_there():
    code = replace(REPORT, eval_set="code", scores=SCORES[12:13])
    card = model_card(replace(SUBJECT, reports=[REPORT, code]))
    assert "On `heldout`, with 95% intervals" in card
    assert "On `code`, with no intervals" in card


@pytest.mark.parametrize(
    ("agreement", "shown", "limited"), [(1.0, "100.00%", False), (0.99999, "99.99%", True), (None, "not known", True)]
)
def test_labels_that_are_not_the_targets_own_are_a_limit(agreement, shown, limited):
    card = model_card(replace(SUBJECT, reports=[replace(REPORT, label_agreement=agreement)]))
    assert shown in row(card, "heldout")
    assert ("Rungs 2 and 3 are exact only if" in card) is limited


@pytest.mark.parametrize(("greedy", "near", "rounding"), [(True, 2, True), (True, 0, False), (False, 2, False)])
def test_greedy_answers_of_the_target_are_exact_but_for_rounding(greedy: bool, near: int, rounding: bool):
    counts = LabelCounts(tokens=100, differing=2, near_ties=near)
    report = replace(REPORT, label_agreement=counts.agreement, labels=counts, greedy_answers=greedy)
    card = model_card(replace(SUBJECT, reports=[report]))
    assert ("Rungs 2 and 3 are exact but for rounding" in card) is rounding
    assert ("Rungs 2 and 3 are exact only if" in card) is not rounding


def test_a_reduced_vocabulary_is_a_limit():
    whole = replace(DRAFT, identity={**DRAFT.identity, "options": {"draft_vocab_size": TARGET.vocab_size}})
    sentence = "of the target's 2,048 tokens"
    assert f"Proposes 1,024 {sentence}" in CARD
    assert sentence not in model_card(replace(SUBJECT, draft=whole))


def test_a_stale_draft_says_so_before_anything_else():
    page = strip_front_matter(model_card(replace(SUBJECT, changes=["weights of the target (since 2026-05-02)"])))
    assert "**This draft is stale.**" in page[: page.index("## Target")]
    assert "* weights of the target (since 2026-05-02)" in page
    assert "stale" not in CARD


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
    scores=(*SCORES, BLOCKS, SAMPLED, RungScore("lookup", 3, "rung3_walk_acc_len", 0.58)),
    rivals=RivalVerdict("lookup", 2.5, 0.58, 1.5, 2.25, 0.95, 40),
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


def test_every_sentence_of_module_and_template_stands_in_a_golden_card():
    cards = "".join(path.read_text(encoding="utf-8") for path in GOLDEN.iterdir())
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    template = Path(module.__file__).with_name("model_card.md.j2").read_text(encoding="utf-8")
    said += [*re.split(r"\{[{%].*?[%}]\}|\n", template, flags=re.DOTALL), *re.findall(r'"([^"]+)"', template)]
    texts = [text.strip(" *.") for text in said if isinstance(text, str) and not text.endswith(".j2")]
    sentences = [*(text for text in texts if len(re.findall(r"\w+", text)) > 2), *RUNG_MEANINGS.values()]
    assert len(sentences) > 20
    assert [text for text in sentences if text not in cards and "%" not in text] == []


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_name_of_the_code_stands_as_a_word(name: str):
    assert find_own_names(model_card(SUBJECTS[name])) == set()
