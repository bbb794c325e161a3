"""Answers and features of engine `hf` beside transformers' own `generate` and the bare model's forward, in turns.

    python benchmarks/hf_rates.py                               # the demo's conversations, target and batches
    python benchmarks/hf_rates.py --conversations 256 --turns 3

All sides run in one process on one thread with one loaded model, and their order is turned from turn to turn. Answers are
all of `draftworks.capture.answers`, from conversations to the published sets; the rival is `model.generate` for the same
batches of prompts, tokenized and padded before the clock starts, and nothing is kept of what it gives. A capture is all of
`draftworks.capture.session`: plan, forward, checks, and a new store on the disk; the bare model's forward is asked for the
same batches, with the logits that it gives by itself, and without. Only tokens that are used count: new ones up to the
end of an answer, and no padding.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import Aim, format_table, print_aims, summarize
from torch import Tensor, nn

from draftworks.capture.answers.regenerate import regenerate
from draftworks.capture.engine import Generated
from draftworks.capture.engines.generate import find_end_tokens
from draftworks.capture.engines.hf import HFTargetEngine, load_hf_engine
from draftworks.capture.session import capture_features
from draftworks.config.registry_files import CaptureSpec, DatasetSpec, ResponseSpec
from draftworks.config.run_files import TOKENS_FOLDER, CaptureRun, RegenerateRun, StoreSpec, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import select, write_conversations
from draftworks.data.datasets import load_conversations
from draftworks.data.tokenized import TokenizedSet
from draftworks.storage.identity import LayerTap
from draftworks.targets.resolve import digest_target_files

REGISTRY = Path(__file__).resolve().parents[1] / "registry"
MAX_LENGTH = 128
ANSWERS = {
    "greedy": ResponseSpec(max_new_tokens=112, batch_size=64),
    "sampled": ResponseSpec(max_new_tokens=112, batch_size=64, temperature=0.8, top_p=0.95, top_k=50),
}
CAPTURE, BARE, BARE_WITHOUT_HEAD = "capture", "bare forward", "bare forward, no head"


@dataclass(frozen=True)
class Rate:
    """One side of one turn."""

    tokens: int
    cpu_s: float
    wall_s: float

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


Turns = dict[str, list[Rate]]


def main(
    conversations: Annotated[int, typer.Option(help="977 of these are trained on in the demo.")] = 977,
    turns: int = 5,
) -> None:
    """Print the rates of all sides, medians over the turns with their ranges, and the ratios within turns."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print_turns(measure(Path(folder), conversations, turns))


def measure(folder: Path, conversations: int, turns: int) -> Turns:
    """Return the rates of every side, turn by turn; a first turn, which warms up, is left out."""
    target = describe_tiny()
    capture = CaptureSpec(dtype="float32", compute_dtype="float32", batch_tokens=8192, device="cpu")
    chat = ChatTokenizer.load(target)
    loaded = load_hf_engine(target, capture, torch.device("cpu"))
    engine = _RecordingEngine(loaded.model, loaded.identity, target.context)
    dataset = DatasetSpec(name="stdlib", files=["models/tiny/corpus.parquet"], format="openai")
    found = load_conversations(dataset, REGISTRY, folder, 0.05).conversations
    write_conversations(folder / "conversations", select(found, conversations), {})

    def answer(kind: str, turn: int) -> int:
        run = RegenerateRun(
            out=folder / f"{kind}-{turn}",
            target=target,
            conversations=folder / "conversations",
            answers=folder / f"answers-{turn}",
            responses=ANSWERS[kind],
            max_length=MAX_LENGTH,
            capture=capture,
        )
        return regenerate(run, lambda: engine, chat).generated_tokens

    def capture_all(turn: int) -> int:
        run = CaptureRun(
            out=folder / f"features-{turn}",
            target=target,
            tokens=folder / "greedy-0" / TOKENS_FOLDER,
            taps=[2, 4, 5],
            capture=capture,
            store=StoreSpec(root=folder / f"store-{turn}"),
        )
        return capture_features(run, lambda: engine, TokenizedSet.open(run.tokens)).tokens

    asked: dict[str, list[Any]] = {}
    for kind in ANSWERS:
        answer(kind, 0)
        asked[kind] = [_pad(batch, left=True) for batch in engine.take_batches()]
    capture_all(0)
    forwards = [_pad(batch, left=False) for batch in engine.take_batches()]
    model = engine.model
    sides: dict[str, Callable[[int], int]] = {
        CAPTURE: capture_all,
        BARE: lambda turn: _forward(model, forwards),
        BARE_WITHOUT_HEAD: lambda turn: _forward(model.base_model, forwards),
    }
    for kind, sampling in ANSWERS.items():
        sides[f"{kind} answers"] = lambda turn, kind=kind: answer(kind, turn)
        sides[f"{kind} generate"] = lambda turn, kind=kind, sampling=sampling: _generate(model, asked[kind], sampling)
    found_turns: Turns = {name: [] for name in sides}
    for turn in range(turns + 1):
        names = list(sides)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rate = time_side(sides[name], turn + 1)
            if turn:
                found_turns[name].append(rate)
    return found_turns


def time_side(side: Callable[[int], int], turn: int) -> Rate:
    """Run one side, which returns how many tokens it made."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = side(turn)
    return Rate(tokens, time.process_time() - cpu, time.perf_counter() - wall)


def describe_tiny() -> TargetFiles:
    """Return the embedded target."""
    path = str(REGISTRY / "models" / "tiny")
    return digest_target_files(
        TargetFiles(
            name="tiny", model=path, tokenizer=path, digest="", tokenizer_digest="",
            num_layers=8, hidden_size=128, vocab_size=2048, context=512,
        )
    )  # fmt: skip


class _RecordingEngine(HFTargetEngine):
    """An engine that remembers the sequences that it was asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._batches: list[Sequence[Sequence[int]]] = []

    def take_batches(self) -> list[Sequence[Sequence[int]]]:
        """Return the batches since the last call."""
        taken, self._batches = self._batches, []
        return taken

    def capture(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        self._batches.append(sequences)
        return super().capture(sequences, taps)

    def generate(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[Generated]:
        self._batches.append(prompts)
        return super().generate(prompts, *args, **options)


def _pad(sequences: Sequence[Sequence[int]], left: bool) -> dict[str, Tensor]:
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)  # (B, S)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(len(sequence))
        ids[row, place] = torch.tensor(sequence)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.inference_mode()
def _forward(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> int:
    """Run the model over padded batches; return how many tokens are no padding."""
    for batch in batches:
        model(**batch, use_cache=False)
    return sum(int(batch["attention_mask"].sum()) for batch in batches)


@torch.inference_mode()
def _generate(model: Any, batches: Sequence[dict[str, Tensor]], sampling: ResponseSpec) -> int:
    """Run transformers' own `generate`; return how many tokens it gave up to the ends of the answers."""
    ends = find_end_tokens(model)
    tokens = 0
    for batch in batches:
        width = batch["input_ids"].shape[1]
        options = {}
        if sampling.temperature:
            options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        given: Any = model.generate(
            **batch,
            max_new_tokens=min(sampling.max_new_tokens, MAX_LENGTH - width),
            do_sample=bool(options),
            pad_token_id=0,
            **options,
        )
        is_end = torch.isin(given[:, width:], torch.tensor(sorted(ends)))  # (B, new)
        tokens += int((is_end.cumsum(-1) - is_end.long() == 0).sum())  # an answer's end token is its last
    return tokens


def print_turns(turns: Turns) -> None:
    """Print a table of all sides, and the aims."""
    rivals = {CAPTURE: (BARE, BARE_WITHOUT_HEAD)} | {f"{kind} answers": (f"{kind} generate",) for kind in ANSWERS}
    aims, rows = [], []
    for ours, others in rivals.items():
        rows.append([ours, _summarize(turns[ours]), ""])
        for other in others:
            shares = [a.tokens_per_cpu_s / b.tokens_per_cpu_s for a, b in zip(turns[ours], turns[other], strict=True)]
            rows.append([other, _summarize(turns[other]), summarize(shares, 2)])
            if other != BARE_WITHOUT_HEAD:
                wanted = 0.9 if ours == CAPTURE else 1.5
                aims.append(Aim(f"tokens/s of `hf`, {ours} / {other}", statistics.median(shares), wanted))
    print(format_table(["", "tokens per CPU second", "ours / this"], rows))
    print_aims(aims)


def _summarize(rates: Sequence[Rate]) -> str:
    return summarize([each.tokens_per_cpu_s for each in rates])


if __name__ == "__main__":
    typer.run(main)
