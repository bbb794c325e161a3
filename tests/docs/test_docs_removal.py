"""No document tells anybody to remove results but by `draftworks prune`, which alone knows what is in use.

A folder that no `current.json` names may be the draft in service, its canary, one that a rollback brings back, or a pin.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import FENCE, ROOT, commands, documents

REMOVAL = re.compile(
    r"\b(remove[ds]?|removing|delet(?:e[ds]?|ing)|rm|wip(?:e[ds]?|ing)|clean up|throw away)\b", re.IGNORECASE
)
RESULTS = re.compile(
    r"\bvar\b|\bvar/|current\.json|\b(results?|folders?|drafts?|reports?|exports?|features?|answers|tokens|objects?|shards?|"
    r"checkpoints?|by hand)\b",
    re.IGNORECASE,
)
SAFE = re.compile(r"`draftworks prune|`prune`|`make clean`|draftworks prune")
ADVICE = re.compile(
    r"^(?:\W*)(?:remove|delete|wipe|rm|clean up|throw away)\b|"
    r"[,;:|(] (?:remove|delete|wipe|clean up|throw away)\b|"
    r"\bmay it be removed\b|\b(?:may|can|to|and|or|then|must|should|please) (?:be )?(?:remove|delete|wipe)d?\b|\bby hand\b",
    re.IGNORECASE,
)
COMMANDS = {"rm -rf .venv": "the environment: no result is in it"}
SENTENCES = {
    "give them the right to, also to delete": "rights of a key in object storage",
    "delete the object that is named": "a damaged object that an error names; its samples are captured again",
    "write a small object to each place": "a trial that the program removes itself",
    "a pod is evicted, drained, or deleted by hand": "a pod, not a result",
    "**To free**": "a definition",
    "Remove what no current, best, pinned or promoted result": "what the job `prune` does",
}
"""Parts of sentences that may stay, each with why."""


def find_sentences(text: str) -> list[str]:
    """Return the sentences and table rows of a page, outside code blocks, each on one line."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    flowing = "\n".join(line for line in FENCE.sub("\n\n", text).splitlines() if not line.startswith("|"))
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*[*#-] )", flowing)]
    return rows + [one for part in paragraphs for one in re.split(r"(?<=[.;!?])\s+", part) if one]


def leads_past_prune(sentence: str) -> bool:
    """Return whether a sentence tells its reader to remove results in another way."""
    said = all(pattern.search(sentence) for pattern in (REMOVAL, RESULTS, ADVICE))
    return said and not SAFE.search(sentence) and not any(part in sentence for part in SENTENCES)


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_leads_past_prune(path: Path):
    if path.name == "CHANGELOG.md":
        return  # it tells what was
    assert [one for one in find_sentences(path.read_text()) if leads_past_prune(one)] == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Where disk runs short, remove folders of old digests of drafts that no `current.json` names.",
        "Older results can be deleted.",
        "| the disk is full | delete old reports |",
        "Delete `var` and start again.",
        "To make it again, remove the export's folder.",
        "| place | what is in `var` | may it be removed |",
    ],
)
def test_advice_to_remove_results_is_noticed(sentence: str):
    assert leads_past_prune(sentence)


@pytest.mark.parametrize("part", SENTENCES)
def test_what_is_allowed_is_still_written(part: str):
    assert any(part in one for path in documents() for one in find_sentences(path.read_text()))


def test_no_command_removes_results():
    found = {" ".join(one.words) for one in commands() if one.words[0] in ("rm", "rmdir", "find", "unlink")}
    assert found == set(COMMANDS)
