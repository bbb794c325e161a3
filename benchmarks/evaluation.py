"""Cost of the rungs of the acceptance ladder: the walk against one pass that proposes at every position of an answer.

    python benchmarks/evaluation.py                   # 256 x 32, one thread, fp32
    python benchmarks/evaluation.py --length 1024 --batch 4 --strategy dflash

The walk and the block counts are read off such a pass, so the aim is a ratio near 1 (at most 1.5). Features are random:
times are real, acceptance means nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from train_step import Case, prepare

from draftworks.drafts.objectives import token_mean_label_mask
from draftworks.drafts.strategy import StepContext
from draftworks.evaluation.ladder.replay import replay


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds for one batch; `ratio` is the median of replay over propose, turn by turn."""

    strategy: str
    length: int
    batch: int
    proposals: int
    accuracy_ms: float
    propose_ms: float
    replay_ms: float
    ratio: float


def milliseconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def measure(case: Case, repeats: int) -> Result:
    strategy, batch = prepare(case)
    count = min(case.ttt, strategy.draft_tokens)
    rows = token_mean_label_mask(batch["loss_mask"], count)[0]
    accuracy, propose, walk = [], [], []
    with torch.no_grad():
        for turn in range(repeats + 1):
            times = [
                milliseconds(lambda: strategy.forward_loss(batch, StepContext(training=False))),
                milliseconds(lambda: strategy.propose(batch, rows, count)),
                milliseconds(lambda: replay(strategy, batch, count)),
            ]
            if turn > 0:  # the first warms up
                for found, value in zip((accuracy, propose, walk), times):
                    found.append(value)
    return Result(
        case.strategy,
        case.length,
        case.batch,
        count,
        accuracy_ms=round(statistics.median(accuracy), 1),
        propose_ms=round(statistics.median(propose), 1),
        replay_ms=round(statistics.median(walk), 1),
        ratio=round(statistics.median(w / p for w, p in zip(walk, propose)), 3),
    )


def main(
    length: Annotated[int, typer.Option(min=8)] = 256,
    batch: Annotated[int, typer.Option(min=1)] = 32,
    ttt: Annotated[int, typer.Option(min=1, help="Proposals per pass.")] = 5,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    strategy: str = "eagle3",
) -> None:
    """Print a small table and one line of JSON."""
    torch.set_num_threads(1)
    result = measure(Case(length=length, batch=batch, ttt=ttt, strategy=strategy), repeats)
    print(f"{'size':>10} {'rungs 0-1 ms':>13} {'propose ms':>11} {'rungs 2-3 ms':>13} {'ratio':>6}")
    size = f"{length}x{batch}"
    print(
        f"{size:>10} {result.accuracy_ms:13.1f} {result.propose_ms:11.1f} {result.replay_ms:13.1f} {result.ratio:6.2f}"
    )
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    typer.run(main)
