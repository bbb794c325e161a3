"""No name of a class stands as a word in what people read: a rename that goes through text is noticed.
No list that people read is cut without saying how many more it has.

`list_names`, `list_lines` and tables with `most` say so. Here the code is searched for the ways in which lists are cut by hand
where text is made: a slice inside `join` or an f-string, `head`, `islice` and `most_common` of a constant.
People are shown the acceptance length, which counts the target's own token; what is stored, without it, is not printed.

`draftworks/evaluation/acceptance_length.py` alone makes one of the other. Here every string and every formatted number of
the code is looked at; what the pages then show is tested beside each of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, documents
from own_names import find_own_names, list_class_names, parse_rooms


@pytest.fixture(scope="module")
def rooms() -> dict[Path, ast.Module]:
    """The trees of all modules, for as long as this file's tests take."""
    return parse_rooms()


def find_texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings of a module that have words: messages, descriptions, pages. Not docstrings, which are for those
    who read code."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in docstrings:
            continue
        if " " in node.value.strip():
            yield node


def test_no_message_or_page_has_the_name_of_a_class_for_a_word(rooms: dict[Path, ast.Module]):
    found = {
        f"{path.relative_to(ROOT)}:{text.lineno}": names
        for path, tree in rooms.items()
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


SAYS_SO = {
    "draftworks/capture/answers/answer_sets.py": "a line of the log behind it has the number of the others",
    "draftworks/data/rejected.py": "a summary, not a page: `rejected` beside it is the number of all",
    "draftworks/evaluation/report/writing.py": "the line behind the table",
    "draftworks/evaluation/report/tables.py": "`left_out`, which the page says",
    "draftworks/fleet/comparison_page.py": "the title",
    "draftworks/fleet/leaderboard.py": "the title",
    "draftworks/page/contents.py": "the line below the table or the chart",
    "draftworks/planning/rates.py": "measurements that are read, not shown",
    "draftworks/preflight/plausible_values.py": "a digest",
    "draftworks/preflight/data_checks.py": "the begin of a text",
    "draftworks/data/served/loading.py": "`files_not_listed` beside it",
    "draftworks/notifications/channels.py": "the last line",
    "draftworks/programs/retention.py": "the last line",
    "draftworks/storage/words.py": "it is the helper",
    "sensors/acting.py": "the last reason",
    "sensors/notifications.py": "the others are told at the next tick",
    "spec_assets/leaderboard.py": "the line behind the table",
}
"""Modules with a cut of their own, and where they say it."""


def find_cuts(tree: ast.Module) -> Iterator[str]:
    """Yield the places where a list is cut on its way into a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (f"{node.lineno}: {ast.unparse(arg)}" for arg in node.args if _is_cut(arg) and _is_named(arg))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "join":
                yield from (f"{node.lineno}: {ast.unparse(cut)}" for arg in node.args for cut in _list_cuts(arg))
            if node.func.attr in ("head", "most_common", "nlargest") and node.args and _is_limit(node.args[-1]):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.FormattedValue) and _is_cut(node.value) and _is_of_a_list(node.value):
            yield f"{node.lineno}: {ast.unparse(node.value)}"
        elif isinstance(node, (ast.Assign, ast.For, ast.comprehension)):
            held = node.value if isinstance(node, ast.Assign) else node.iter
            yield from (f"{held.lineno}: {ast.unparse(cut)}" for cut in _list_cuts(held) if _is_named(cut))


def _list_cuts(node: ast.AST) -> Iterator[ast.Subscript]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Subscript) and _is_cut(each))


def _is_cut(node: ast.AST) -> bool:
    """Whether a node is `x[:N]` with a constant N of two or more."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)):
        return False
    return node.slice.lower is None and node.slice.upper is not None and _is_limit(node.slice.upper)


def _is_limit(node: ast.AST) -> bool:
    """Whether a node is a constant of two or more: the first one alone is called the first, or the commonest."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and node.value > 1
    return isinstance(node, ast.Name) and node.id.lstrip("_").isupper()


def _is_named(node: ast.AST) -> bool:
    """Whether the limit has a name that says that it is for people: MOST_BARS, SHOWN, LISTED."""
    assert isinstance(node, ast.Subscript)
    assert isinstance(node.slice, ast.Slice)
    upper = node.slice.upper
    words = ("SHOWN", "LISTED", "LINES", "MOST", "BARS", "ROWS", "REASONS", "LOGGED")
    return isinstance(upper, ast.Name) and any(word in upper.id for word in words)


def _is_of_a_list(node: ast.AST) -> bool:
    """Whether what is cut is a list by its look: `sorted(x)[:5]`, `names[:5]`; a text is cut too, and shows that it was."""
    assert isinstance(node, ast.Subscript)
    of = node.value
    if isinstance(of, ast.Call):
        return isinstance(of.func, ast.Name) and of.func.id in ("sorted", "list")
    name = ast.unparse(of)
    return name.endswith("s")


def test_every_cut_list_says_so(rooms: dict[Path, ast.Module]):
    found = {str(path.relative_to(ROOT)): list(find_cuts(tree)) for path, tree in rooms.items()}
    assert {path: cuts for path, cuts in found.items() if cuts and path not in SAYS_SO} == {}
    assert {path for path in SAYS_SO if not found[path]} <= {"draftworks/storage/words.py", "sensors/acting.py"}


@pytest.mark.parametrize(
    "code",
    [
        "f\"there are: {', '.join(known[:20])}\"",
        '", ".join(str(each) for each in sorted(found)[:5])',
        'f"samples {sorted(left)[:5]} are gone"',
        "largest = by_size.groupby('column').head(MAX_SLICES)",
        "rows = [row for row in rows[:KEPT_REASONS]]",
        "rows = counts.most_common(5)",
    ],
)
def test_a_list_that_is_cut_by_hand_is_noticed(code: str):
    assert list(find_cuts(ast.parse(code)))


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


def test_only_the_acceptance_length_is_shown(rooms: dict[Path, ast.Module]):
    refused = {
        f"{path.relative_to(ROOT)}:{found}"
        for path, tree in rooms.items()
        if path != HELPER and not {path, *path.parents} & set(OF_KEYS)
        for found in find_refused(tree)
    }
    assert refused == set()


def test_templates_show_it_by_its_filters():
    """Their code has names of figures, which are formatted by `tau` and `measured`."""
    for path in ROOT.glob("draftworks/**/*.j2"):
        text = path.read_text()
        words = re.sub(r"\{[{%].*?[%}]\}", "", text, flags=re.DOTALL)
        assert [each for each in (STORED, IN_WORDS, NAMED_ALIKE) if each.search(words)] == [], path
        shown = [each for each in re.findall(r"\{\{(.*?)\}\}", text) if FIGURES & set(re.findall(r"\w+", each))]
        assert all("| tau" in each or "| measured" in each for each in shown), path


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
