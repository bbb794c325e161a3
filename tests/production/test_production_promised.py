"""Promised beside served: requests of a report's own prompts are found again, and at temperature 0 their counts are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from promised_site import PromisedSite

from draftworks.data.conversations import Conversation, Turn
from draftworks.data.tokenized import TokenRow
from draftworks.production.asked import digest_messages
from draftworks.production.promised import Place, PromptIndex
from draftworks.production.request_log import shorten
from draftworks.production.served_slices import ServedStanding
from draftworks.production.served_view import list_log_notes, list_notes, list_rows, render_markdown, to_json
from draftworks.storage.identity import digest

WEIGHTS = digest("weights of a")
PROMPTS = 40


@pytest.fixture
def site(tmp_path: Path) -> PromisedSite:
    site = PromisedSite(tmp_path)
    site.promote(site.publish("a", 1.0, prompts=PROMPTS))
    return site


def stand(site: PromisedSite) -> ServedStanding:
    [standing] = site.read_logs().standings
    assert standing.problem == ""
    return standing


@pytest.mark.parametrize("chat", [True, False], ids=["by messages", "by tokens"])
def test_requests_of_a_reports_prompts_have_the_walks_counts(site: PromisedSite, chat: bool):
    draft = site.open().register.require().draft.digest
    site.write(*(site.serve(index, 1.0, WEIGHTS, chat, draft=draft) for index in range(PROMPTS)))
    found = stand(site).prompts
    assert found is not None
    assert (found.requests, found.prompts, found.equal, found.other_answer) == (PROMPTS, PROMPTS, PROMPTS, 0)
    assert found.paired is not None
    assert (found.paired.difference, found.paired.interval.low, found.paired.interval.high) == (0.0, 0.0, 0.0)


def test_what_is_sampled_or_another_answer_is_not_compared_and_a_difference_is_shown(site: PromisedSite):
    draft = site.open().register.require().draft.digest
    requests = [site.serve(index, 1.0, WEIGHTS, draft=draft) for index in range(30)]
    requests[0] = replace(requests[0], temperature=0.7)
    requests[1] = replace(requests[1], temperature=None)
    requests[2] = replace(requests[2], completion_tokens=50)
    requests[3] = replace(requests[3], completion_tokens=None)
    requests[4] = replace(requests[4], passes=120, accepted=(requests[4].accepted or 0) - 20)
    stranger = replace(requests[5], id="x", prompt=digest_messages([("user", "something else")]))
    again = replace(requests[6], id="y", time=requests[6].time + 1)
    site.write(*requests, stranger, again)
    standing = stand(site)
    found = standing.prompts
    assert found is not None
    assert (found.requests, found.sampled, found.other_answer, found.prompts, found.equal) == (31, 2, 2, 26, 25)
    [difference] = found.differences
    assert difference.sample == "s4"
    assert difference.served == (120, difference.promised[1] - 20)
    assert found.paired is not None
    assert found.paired.difference < 0
    [said, one] = [note for note in list_notes(standing) if "prompt" in note and "eval set heldout" not in note]
    assert "25 of 26 prompts have the walk's counts exactly" in said
    assert one.startswith("prompt s4: ")


def test_slices_stand_beside_the_walk_of_the_same_slice(site: PromisedSite):
    site.write(*(site.serve(index, 0.5, WEIGHTS, id=f"{n}-{index}") for n in range(2) for index in range(PROMPTS)))
    logs = site.read_logs()
    [standing] = logs.standings
    assert logs.assumed == 2 * PROMPTS  # lines do not say their draft: the one in service at their time
    assert standing.draft == "not known"  # it was not in service yet
    assert "has no report here" in standing.problem
    draft = site.open().register.require().draft.digest
    site.write(*(site.serve(i, 0.5, WEIGHTS, id=f"{n}-{i}", draft=draft) for n in range(2) for i in range(PROMPTS)))
    standing = stand(site)
    by_name = {each.name: each for each in standing.slices}
    for name in ("all requests", "language de", "language en"):
        one = by_name[name]
        assert one.promised is not None
        assert one.beside is not None
        assert one.now is not None
        assert abs(one.promised.value - 1.0) < 0.02
        assert abs(one.beside.difference + 0.5) < 0.02
        assert one.beside.interval.high < -0.4
    assert by_name["language de"].promised is not None
    assert by_name["language de"].promised.count == PROMPTS // 2


def test_the_views_say_the_same(site: PromisedSite):
    draft = site.open().register.require().draft.digest
    site.write(*(site.serve(index, 1.0, WEIGHTS, draft=draft, drafted=200) for index in range(PROMPTS)))
    logs = site.read_logs()
    [standing] = logs.standings
    rows = list_rows(standing)
    assert [row[:3] for row in rows] == [("all", "", "40"), ("language", "de", "20"), ("language", "en", "20")]
    assert rows[0][3].startswith("2.0")
    notes = list_notes(standing)
    assert "the first hours of this draft are not over: nothing to compare with yet" in notes
    assert "servers propose 2.0 tokens per pass, the report 5: the walk does not compare" in notes
    assert list_log_notes(logs) == ["1 log, 40 lines: 40 used"]
    said = to_json(logs)["strategies"][0]
    assert (said["draft"], said["prompts"]["equal"], said["fell"]) == (draft, PROMPTS, [])
    page = render_markdown("small", logs)
    assert f"requests of small, eagle3, draft {draft}" in page
    assert "| language" in page


ROWS = [
    TokenRow("two", np.arange(6, dtype=np.int32), np.array([0, 1, 0, 0, 1, 1], dtype=bool)),
    TokenRow("a.on", np.arange(3, dtype=np.int32) + 50, np.array([0, 0, 1], dtype=bool), {"thinking": "on"}),
    TokenRow("a.off", np.arange(3, dtype=np.int32) + 70, np.array([0, 0, 1], dtype=bool), {"thinking": "off"}),
]


def test_every_answer_of_a_sample_is_found_and_a_prompt_asked_both_ways_by_its_thinking():
    turns = [Turn("user", "q"), Turn("assistant", "a"), Turn("user", "r"), Turn("assistant", "b")]
    both = [Conversation(f"a.{way}", tuple(turns[:2]), {"thinking": way}) for way in ("on", "off")]
    index = PromptIndex.of(ROWS, [Conversation("two", tuple(turns)), *both])
    assert index.answers == {"two": 2, "a.on": 1, "a.off": 1}
    later = shorten(digest_messages([("user", "q"), ("assistant", "a"), ("user", "r")]))
    assert index.find(later, "default") == Place("two", 1)
    first = shorten(digest_messages([("user", "q")]))
    assert [index.find(first, how) for how in ("on", "off", "default")] == [Place("a.on", 0), Place("a.off", 0), None]
    assert index.find(1, "on") is None


def test_a_conversation_of_which_turns_were_left_out_is_known_by_its_tokens_alone():
    turns = (Turn("user", "q"), Turn("assistant", "a"))
    index = PromptIndex.of(ROWS[:1], [Conversation("two", turns)])
    assert index.find(shorten(digest_messages([("user", "q")])), "default") is None
    assert len(index.places) == 2
