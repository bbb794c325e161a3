"""Greedy answers of engine `hf` on a real model beside transformers' own `generate` with the same batch limit, in turns.

    python benchmarks/answers.py FOLDER                          # a model's folder, in float32; prompts of this project's pages
    python benchmarks/answers.py FOLDER --prompts 64 --batch 64 --turns 3

Every side of every turn is a process of its own on one thread, which reads token ids and has nothing but the model beside
them, so that its peak memory counts. `generate` gets the prompts in their order, padded on the left to the longest of
a batch, or, as a second rival, in the order of their lengths. Prompts are of 30 to 900 tokens, evenly on a logarithmic
scale, or all of one length. Only new tokens up to the end of an answer count.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import Aim, format_table, print_aims, summarize
from turns import read_memory

from draftworks.capture.engine import AskedPrompt
from draftworks.capture.engines.generate import answer_stream, find_end_tokens
from draftworks.config.registry_files import ResponseSpec

PAGES = Path(__file__).resolve().parents[1] / "docs"
SHORTEST, LONGEST = 30, 900
OURS, GENERATE, SORTED = "answers", "generate", "generate, sorted"
MIXED, EQUAL = "30 to 900 tokens", "equal"


@dataclass(frozen=True)
class Side:
    """One side of one turn.

    Attributes:
        peak: largest resident memory over the bytes of the weights.
    """

    answers: list[list[int]]
    cpu_s: float
    peak: float

    @property
    def rate(self) -> float:
        """Tokens of answers per CPU second."""
        return sum(map(len, self.answers)) / self.cpu_s


def main(
    folder: Path,
    prompts: int = 24,
    batch: int = 16,
    new_tokens: int = 48,
    length: Annotated[int, typer.Option(help="Tokens of the prompts of one length.")] = 120,
    turns: int = 3,
    one_side: Annotated[str | None, typer.Option(hidden=True)] = None,
    given: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print a table of both kinds of prompts, how many answers are the same, and the aims."""
    if one_side is not None and given is not None:
        serve_side(one_side, folder, json.loads(given.read_text()), batch, new_tokens)
        return
    drawn = draw_prompts(folder, prompts, length)
    found: dict[tuple[str, str], list[Side]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(turns):
            for kind, asked in drawn.items():
                sides = [OURS, GENERATE, *([SORTED] if kind == MIXED else [])]
                path = Path(scratch) / "prompts.json"
                path.write_text(json.dumps(asked))
                for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                    options = ["--batch", batch, "--new-tokens", new_tokens, "--one-side", side, "--given", path]
                    command = map(str, [sys.executable, __file__, folder, *options])
                    printed = subprocess.run(list(command), check=True, stdout=subprocess.PIPE, text=True).stdout
                    found.setdefault((kind, side), []).append(Side(**json.loads(printed.splitlines()[-1])))
    print_sides(found)
    print_differences(folder, drawn, found)
    print_aims(make_aims(found))


def draw_prompts(folder: Path, count: int, length: int) -> dict[str, list[list[int]]]:
    """Return prompts of each kind: a question about a piece of a page, with the model's own template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text = "\n".join(path.read_text() for path in sorted(PAGES.glob("*.md")))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Explain this: @"}], add_generation_prompt=True, return_dict=False
    )
    mark = max(place for place, token in enumerate(asked) if "@" in tokenizer.decode([token]))
    draw = random.Random(7)

    def make(size: int) -> list[int]:
        piece = max(1, size - len(asked) + 1)
        at = draw.randrange(len(ids) - piece)
        return [*asked[:mark], *ids[at : at + piece], *asked[mark + 1 :]]

    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** draw.random()) for _ in range(count)]
    return {MIXED: list(map(make, lengths)), EQUAL: [make(length) for _ in range(count)]}


def serve_side(side: str, folder: Path, prompts: Sequence[Sequence[int]], batch: int, new_tokens: int) -> None:
    """Answer the prompts and print one side's JSON."""
    torch.set_num_threads(1)
    model = load_model(folder)
    began = time.process_time()
    if side == OURS:
        answers = answer(model, prompts, ResponseSpec(max_new_tokens=new_tokens, batch_size=batch))
    else:
        order = sorted(range(len(prompts)), key=lambda each: len(prompts[each]) if side == SORTED else 0)
        made = iter(list(generate(model, [prompts[each] for each in order], batch, new_tokens)))
        by_place = {place: next(made) for place in order}
        answers = [by_place[place] for place in range(len(prompts))]
    cpu_s = time.process_time() - began
    weights = sum(each.nbytes for each in model.parameters()) / 1e6
    print(json.dumps({"answers": answers, "cpu_s": cpu_s, "peak": read_memory("VmHWM") / weights}))


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def answer(model: Any, prompts: Sequence[Sequence[int]], sampling: ResponseSpec) -> list[list[int]]:
    """Answer as engine `hf` does, at the default budget of memory."""
    asked = [AskedPrompt(str(number), tuple(prompt)) for number, prompt in enumerate(prompts)]
    waiting = deque(sorted(asked, key=lambda each: -len(each.prompt)))
    context = model.config.max_position_embeddings
    stream = answer_stream(model, waiting, sampling, context)
    found = {each.asked: each.answer.ids for advance in stream for each in advance.answered}
    return [list(found[each]) for each in asked]


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], batch: int, new_tokens: int) -> Iterator[list[int]]:
    """Answer as a user of transformers does, batch by batch."""
    ends = find_end_tokens(model)
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(each)) + list(each) for each in part])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in part])
        made = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        for row in made[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
            yield row[: end + 1]


Found = dict[tuple[str, str], list[Side]]


def list_ratios(found: Found, kind: str, side: str) -> list[float]:
    return [ours.rate / other.rate for ours, other in zip(found[kind, OURS], found[kind, side], strict=True)]


def print_sides(found: Found) -> None:
    """Print the table."""
    rows = [
        [
            f"{kind}: {side}",
            summarize([each.rate for each in sides], 1),
            "" if side == OURS else summarize(list_ratios(found, kind, side), 2),
            summarize([each.peak for each in sides], 2),
        ]
        for (kind, side), sides in found.items()
    ]
    print(format_table(["prompts", "tokens per CPU second", "ours / this", "peak memory / weights"], sorted(rows)))


def print_differences(folder: Path, drawn: dict[str, list[list[int]]], found: Found) -> None:
    """Print how many answers are those of `generate`, and how near the others are."""
    model, same, gaps = load_model(folder), 0, []
    pairs = [
        (prompt, ours, theirs)
        for kind, prompts in drawn.items()
        for prompt, ours, theirs in zip(
            prompts, found[kind, OURS][0].answers, found[kind, GENERATE][0].answers, strict=True
        )
    ]
    for prompt, ours, theirs in pairs:
        if ours == theirs:
            same += 1
            continue
        place = next((n for n, both in enumerate(zip(ours, theirs, strict=False)) if both[0] != both[1]), None)
        if place is None:
            raise SystemExit(f"an answer is the beginning of another: {ours}, {theirs}")
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ours[:place]]]), logits_to_keep=1).logits[0, -1].double()
        gaps.append(abs(float(logits[ours[place]] - logits[theirs[place]])))
    near = f"; the others part where two logits differ by at most {max(gaps):.1e}" if gaps else ""
    print(f"\n{same} of {len(pairs)} answers are those of `generate`{near}.")


def make_aims(found: Found) -> list[Aim]:
    wanted = {MIXED: 2.0, EQUAL: 0.95}
    rates = [
        Aim(f"answers / `generate`, {kind}", statistics.median(list_ratios(found, kind, GENERATE)), aim)
        for kind, aim in wanted.items()
    ]
    peak = max(side.peak for kind in wanted for side in found[kind, OURS])
    return [*rates, Aim("peak resident memory of answers over the float32 weights", peak, 2.5, at_most=True)]


if __name__ == "__main__":
    typer.run(main)
