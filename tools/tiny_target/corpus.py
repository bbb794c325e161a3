"""English conversations from the documentation that ships inside every Python.

Docstrings of the standard library (read with `ast`, nothing is imported or run) and the topics of
`pydoc_data` become question-and-answer conversations. The text is under the Python Software
Foundation License; so is the Parquet file made of it.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_PACKAGES = {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "turtledemo", "ensurepip"}
SHORTEST_ANSWER = 60
"""Characters; shorter docstrings ("Return True.") teach a model nothing but noise."""
LONGEST_TURN = 700
"""Characters of one answer; a longer text becomes several turns."""
TURNS_PER_CONVERSATION = 3

OPENERS = ("What does {name} do?", "Explain {name}.", "Describe the {kind} {name}.", "How do I use {name}?")
FOLLOW_UPS = ("Go on.", "What else should I know?", "Please continue.")


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Entry:
    """One documented thing: its dotted name, what kind of thing it is, and its text."""

    name: str
    kind: str
    text: str


def build_conversations() -> list[dict]:
    """Rows of the corpus: `id`, `task` (kind of thing), `messages` in OpenAI form; sorted, without repeated texts."""
    seen: set[str] = set()
    rows: list[dict] = []
    for entry in [*docstrings(), *topics()]:
        if len(entry.text) < SHORTEST_ANSWER or entry.text in seen:
            continue
        seen.add(entry.text)
        rows.extend(conversations_of(entry))
    return rows


def docstrings() -> Iterator[Entry]:
    """Every public module, class and function of the standard library that has a docstring."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_PACKAGES.intersection(relative.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        yield from _documented(tree, module)


def _documented(node: Documented, name: str) -> Iterator[Entry]:
    kinds = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
    text = ast.get_docstring(node)
    if text:
        yield Entry(name, kinds[type(node)], text.strip())
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            yield from _documented(child, f"{name}.{child.name}")


def topics() -> Iterator[Entry]:
    """The language reference as `help()` shows it."""
    from pydoc_data.topics import topics as texts

    for name, text in sorted(texts.items()):
        yield Entry(name, "topic", text.strip())


def conversations_of(entry: Entry) -> Iterator[dict]:
    """A text as one conversation, or as several when it is longer than a few turns."""
    chunks = _chunks(entry.text)
    for part, start in enumerate(range(0, len(chunks), TURNS_PER_CONVERSATION)):
        identifier = f"{entry.kind}/{entry.name}/{part}"
        pick = hashlib.sha256(identifier.encode()).digest()[0]
        messages = []
        for turn, answer in enumerate(chunks[start : start + TURNS_PER_CONVERSATION]):
            opener = OPENERS if part == 0 and turn == 0 else (f"Tell me more about {entry.name}.",)
            choices = opener if turn == 0 else FOLLOW_UPS
            question = choices[pick % len(choices)].format(name=entry.name, kind=entry.kind)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"id": identifier, "task": entry.kind, "messages": messages}


def _chunks(text: str) -> list[str]:
    """Paragraphs joined up to LONGEST_TURN characters; an overlong paragraph is cut at a line end."""
    pieces: list[str] = []
    for paragraph in text.split("\n\n"):
        while len(paragraph) > LONGEST_TURN:
            cut = paragraph.rfind("\n", 1, LONGEST_TURN)
            cut = cut if cut > 0 else LONGEST_TURN
            pieces.append(paragraph[:cut])
            paragraph = paragraph[cut:].lstrip("\n")
        if paragraph.strip():
            pieces.append(paragraph)
    chunks: list[str] = []
    for piece in pieces:
        if chunks and len(chunks[-1]) + len(piece) + 2 <= LONGEST_TURN:
            chunks[-1] += "\n\n" + piece
        else:
            chunks.append(piece)
    return chunks
