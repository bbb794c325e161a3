"""No name of a class stands as a word in what people read: a rename that goes through text is noticed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from documents import ROOT, documents
from own_names import find_own_names, list_class_names, parse_rooms


def find_texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings of a module that have words: messages, descriptions, pages. Not docstrings, which are for those
    who read code."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in docstrings:
            continue
        if " " in node.value.strip():
            yield node


def test_no_message_or_page_has_the_name_of_a_class_for_a_word():
    found = {
        f"{path.relative_to(ROOT)}:{text.lineno}": names
        for path, tree in parse_rooms().items()
        for text in find_texts(tree)
        if (names := find_own_names(str(text.value)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "path", [*documents(), *sorted(ROOT.glob("draftworks/**/*.j2"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_document_or_template_has_the_name_of_a_class_for_a_word(path):
    assert find_own_names(path.read_text()) == set()


def test_names_are_found_where_they_are_words_only():
    assert {"ReportScore", "EvalConfig"} <= list_class_names()
    assert find_own_names("ReportScore on the eval sets above; cached by EvalConfig.") == {"ReportScore", "EvalConfig"}
    assert find_own_names("`ReportScore` in draftworks.x:EvalConfig, Report and Finding") == set()
