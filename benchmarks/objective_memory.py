"""Peak memory of a training step at twice the samples and at twice the vocabulary.

    python benchmarks/objective_memory.py
    python benchmarks/objective_memory.py --strategies dflash --samples 4 --samples 16 --vocab 32000

Forward and backward of one micro-batch of random features; weights, batch and the target's tensors exist before and are
not counted. For comparison, the size of one tensor with the logits of all labels, which an objective without chunks
would hold more than once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from peak_memory import peak_bytes
from train_step import STRATEGIES, Case, prepare

from draftworks.config.strategies import resolve_strategy
from draftworks.drafts.strategy import StepContext, StepOutput

FLOAT = 4
MIB = 2**20


@dataclass(frozen=True)
class Result:
    """Figures of one size.

    Attributes:
        labels: supervised labels over all places of blocks or steps of chains.
        head_rows: tokens that the draft's head predicts.
        train_mib, evaluate_mib: peak memory.
        logits_mib: of one float32 tensor of all logits.
    """

    strategy: str
    samples: int
    labels: int
    vocab: int
    head_rows: int
    train_mib: float
    evaluate_mib: float
    logits_mib: float


def main(
    strategies: Annotated[list[str], typer.Option()] = list(STRATEGIES),  # noqa: B006
    samples: Annotated[list[int], typer.Option()] = [4, 8],  # noqa: B006
    vocab: Annotated[list[int], typer.Option(help="Of the target; a reduced one is a quarter.")] = [8192, 16384],  # noqa: B006
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here too.")] = None,
) -> None:
    """Measure every strategy at every size; prints a table, and one JSON line per row."""
    torch.set_num_threads(1)
    sizes = itertools.product(strategies, vocab, samples)
    results = [measure(Case(length, count, name, vocab=v, draft_vocab=v // 4)) for name, v, count in sizes]
    print(table(results))
    lines = [json.dumps(asdict(result)) for result in results]
    print("\n".join(lines))
    if json_file is not None:
        json_file.write_text("\n".join(lines) + "\n")


def measure(case: Case) -> Result:
    strategy, batch = prepare(case)

    def train() -> StepOutput:
        output = strategy.forward_loss(batch, StepContext(global_step=1, total_steps=4, training=True))
        output.loss_sum.backward()
        return output

    @torch.no_grad()
    def evaluate() -> StepOutput:
        return strategy.forward_loss(batch, StepContext(global_step=1, total_steps=4, training=False))

    labels = int(evaluate().metric_sums["acc_denoms"].sum())
    head_rows = case.draft_vocab if resolve_strategy(case.strategy).uses_vocab_mapping else case.vocab
    return Result(
        strategy=case.strategy,
        samples=case.batch,
        labels=labels,
        vocab=case.vocab,
        head_rows=head_rows,
        train_mib=round(peak_bytes(train) / MIB, 1),
        evaluate_mib=round(peak_bytes(evaluate) / MIB, 1),
        logits_mib=round(labels * head_rows * FLOAT / MIB, 1),
    )


def table(results: Sequence[Result]) -> str:
    """Return the results with the memory of one more label, against the row before if that differs in samples alone."""
    lines = [
        f"{'strategy':>8} {'vocabulary':>10} {'samples':>8} {'labels':>7} {'train MiB':>10} {'KiB a label':>12} "
        f"{'evaluate MiB':>13} {'logits MiB':>11}"
    ]
    for before, one in zip([None, *results], results, strict=False):
        lines.append(
            f"{one.strategy:>8} {one.vocab:>10} {one.samples:>8} {one.labels:>7} {one.train_mib:>10} {_a_label(before, one):>12} "
            f"{one.evaluate_mib:>13} {one.logits_mib:>11}"
        )
    return "\n".join(lines)


def _a_label(before: Result | None, one: Result) -> str:
    if before is None or (before.strategy, before.vocab) != (one.strategy, one.vocab):
        return ""
    return f"{(one.train_mib - before.train_mib) * 1024 / (one.labels - before.labels):.1f}"


if __name__ == "__main__":
    typer.run(main)
