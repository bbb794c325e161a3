"""No list that people read is cut without saying how many more it has.

`list_names`, `list_lines` and tables with `most` say so. Here the code is searched for the ways in which lists are cut by hand
where text is made: a slice inside `join` or an f-string, `head`, `islice` and `most_common` of a constant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from documents import ROOT
from own_names import parse_rooms

SAYS_SO = {
    "draftworks/capture/answers/answer_sets.py": "a line of the log behind it has the number of the others",
    "draftworks/data/rejected.py": "a summary, not a page: `rejected` beside it is the number of all",
    "draftworks/evaluation/report/writing.py": "the line behind the table",
    "draftworks/evaluation/report/tables.py": "`left_out`, which the page says",
    "draftworks/fleet/comparison_page.py": "the title",
    "draftworks/fleet/leaderboard.py": "the title",
    "draftworks/planning/rates.py": "measurements that are read, not shown",
    "draftworks/preflight/gates.py": "a digest",
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


def test_every_cut_list_says_so():
    found = {str(path.relative_to(ROOT)): list(find_cuts(tree)) for path, tree in parse_rooms().items()}
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
