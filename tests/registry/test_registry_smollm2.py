"""The prompts of the example with a real model: the list that its figures are of, and what stands on its two sides."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftworks.data.formats import parse_conversation
from draftworks.data.prepare import split_parts

EXAMPLE = Path(__file__).resolve().parents[2] / "registry" / "examples" / "smollm2"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """What prompts.py defines; as a script it finds fetch.py beside it."""
    sys.path.insert(0, str(EXAMPLE))
    return runpy.run_path(str(EXAMPLE / "prompts.py"))


@pytest.fixture(scope="module")
def written(script: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The rows of every size, by its name. That they can be written says that their digest is the published one."""
    folder = tmp_path_factory.mktemp("prompts")
    script["write_sizes"](folder)
    return {path.stem: [json.loads(line) for line in path.open(encoding="utf-8")] for path in folder.iterdir()}


def skeleton(turns: str | list[str]) -> set[tuple[str, ...]]:
    """Runs of three words of a template; all that a prompt changes in it is one word."""
    text = re.sub(r"\{[^}]*\}", "_", turns if isinstance(turns, str) else " ".join(turns))
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[place : place + 3]) for place in range(len(words) - 2)}


def test_the_list_has_all_kinds_and_the_split_is_that_of_the_templates(written: dict[str, list[dict[str, Any]]]):
    rows = written["long"]
    parts = split_parts((parse_conversation(row, "openai") for row in rows), 0.1)
    sides = {part: {item.columns["template"].split("/")[1] for item in items} for part, items in parts.items()}
    assert sides == {"train": {"train"}, "heldout": {"held_out"}}
    assert {part: len(items) for part, items in parts.items()} == {"train": 3000, "heldout": 300}
    assert len({item.prompt_key for items in parts.values() for item in items}) == len(rows)
    kinds = Counter(row["category"] for row in rows)
    assert len(kinds) == 10
    assert kinds["reasoning"] <= len(rows) / 3


def test_a_smaller_size_is_part_of_each_larger_one(written: dict[str, list[dict[str, Any]]], script: dict[str, Any]):
    sizes = list(script["SIZES"])
    texts = {name: {json.dumps(row) for row in rows} for name, rows in written.items()}
    assert all(texts[small] < texts[large] for small, large in zip(sizes, sizes[1:], strict=False))


def test_no_template_of_one_side_is_one_of_the_other_but_for_words():
    for kind, sides in yaml.safe_load((EXAMPLE / "templates" / "prompts.yaml").read_text())["categories"].items():
        for one, other in product(map(skeleton, sides["train"]), map(skeleton, sides["held_out"])):
            assert len(one & other) <= 0.25 * min(len(one), len(other)), kind


def test_the_served_target_is_the_short_one_and_its_servers():
    short, served = (yaml.safe_load((EXAMPLE / "targets" / f"{name}.yaml").read_text()) for name in ("short", "served"))
    assert served["evaluation"].pop("serving")["prompts"] > 0
    assert {**served, "description": ""} == {**short, "description": ""}


def test_other_templates_are_refused_before_anything_is_written(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(script["write_sizes"].__globals__, "make_rows", lambda _: {"train": [], "held_out": []})
    with pytest.raises(script["FetchError"], match=r"expected the SHA-256 \w+…, found e3b0c44298fc1c14…"):
        script["write_sizes"](tmp_path)
    assert not any(tmp_path.iterdir())
