"""People are shown the acceptance length, which counts the target's own token; what is stored, without it, is not printed.

`draftworks/evaluation/acceptance_length.py` alone makes one of the other. Here every string and every formatted number of
the code is looked at; what the pages then show is tested beside each of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from documents import ROOT
from own_names import parse_rooms

HELPER = ROOT / "draftworks/evaluation/acceptance_length.py"
OF_KEYS = (ROOT / "draftworks/config", ROOT / "draftworks/training/checkpoint_manager.py")
"""Of keys: margins and best_metric keep meaning accepted draft tokens per pass."""
STORED = re.compile(r"acc_len")
IN_WORDS = re.compile(r"accepted (?:draft |proposed )?tokens? (?:are accepted )?per pass|tokens? accepted per pass")
NAMED_ALIKE = re.compile(r"acceptance length|mean accepted length", re.IGNORECASE)
FIGURES = {"micro", "macro", "gauge", "simulated_acc_len", "tokens_per_pass", "reference_value", "shared_a", "shared_b"}
SIGN = ("+", "z")


def find_refused(tree: ast.Module) -> Iterator[str]:
    """Yield what a module prints of an acceptance without the helper."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    changes = {id(text) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for text in _list_changes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
            if STORED.search(text) and " " in text:
                yield f"{node.lineno}: a stored name in words: {text!r}"
            if IN_WORDS.search(text) and id(node) not in changes:
                yield f"{node.lineno}: without the target's own token: {text!r}"
            if NAMED_ALIKE.search(text):
                yield f"{node.lineno}: named by hand: {text!r}"
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None and FIGURES & _list_names(node.value):
            yield f"{node.lineno}: formatted by hand: {ast.unparse(node)}"
        if isinstance(node, ast.FormattedValue) and _shows_stored_name(node.value):
            yield f"{node.lineno}: a stored name is shown: {ast.unparse(node)}"


def _list_changes(node: ast.JoinedStr) -> Iterator[ast.expr]:
    """Yield the texts behind a number with a sign: a difference is the same of both."""
    for number, text in zip(node.values, node.values[1:], strict=False):
        if isinstance(number, ast.FormattedValue) and _get_format(number).startswith(SIGN):
            yield text


def _get_format(node: ast.FormattedValue) -> str:
    spec = "" if node.format_spec is None else ast.unparse(node.format_spec)
    return spec.removeprefix("f").strip("'\"")


def _list_names(node: ast.expr) -> set[str]:
    found = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)}


def _shows_stored_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "metric"


def test_only_the_acceptance_length_is_shown():
    refused = {
        f"{path.relative_to(ROOT)}:{found}"
        for path, tree in parse_rooms().items()
        if path != HELPER and not {path, *path.parents} & set(OF_KEYS)
        for found in find_refused(tree)
    }
    assert refused == set()


@pytest.mark.parametrize(
    "code",
    [
        'f"{walk:.3f} accepted tokens per pass of the target"',
        'label(axes, "rung3_walk_acc_len (draft tokens per pass)")',
        'f"{acceptance.micro:.2f}"',
        "f\"{found['micro']:.2f} ({low})\"",
        'f"{result.simulated_acc_len:.2f}"',
        '("rung", "accepted draft tokens per pass")',
        'f"Draft tokens accepted per pass: {x}"',
        'f"the acceptance length is {x:.2f}"',
        'f"(`{best.metric}` on heldout)"',
    ],
)
def test_a_print_past_the_helper_is_noticed(code: str):
    assert list(find_refused(ast.parse(f"shown = {code}")))


def test_differences_and_stored_names_by_themselves_are_no_such_print():
    code = (
        'key = "eval/rung3_walk_acc_len"; said = f"{change:+.3f} accepted tokens per pass ({low:+.3f} to {high:+.3f})"'
    )
    assert list(find_refused(ast.parse(code))) == []
