"""Time and memory of one training step: forward, backward, clipping and AdamW on random features.

    python benchmarks/train_step.py                              # EAGLE-3: 1024x1 and 512x4, one thread, fp32
    python benchmarks/train_step.py 2048x1 --ttt 3
    python benchmarks/train_step.py 1024x4 --strategy dflash     # 2 layers, blocks of 8, 64 anchors per sample
    python benchmarks/train_step.py 1024x4 --strategy domino     # any of STRATEGIES, with the options there

Every size runs in a process of its own, for its peak memory. Features are random, so the loss means nothing. The target's
head is scaled down outside the draft vocabulary, so every teacher token is inside and no position is left out.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import TypeAdapter

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from draftworks.config.strategies import StrategyOptions
    from draftworks.drafts.strategy import DraftStrategy, StepOutput
    from draftworks.drafts.target_parts import TargetParts
    from draftworks.features.contracts import TrainBatch

Loss = Literal["token_mean", "specforge"]


@dataclass(frozen=True)
class Case:
    """The measured configuration. The last `loss_share` of each sample is supervised."""

    length: int
    batch: int
    strategy: str = "eagle3"
    ttt: int = 7
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 384
    vocab: int = 4096
    draft_vocab: int = 1000
    loss_share: float = 7 / 8
    loss: Loss = "token_mean"
    threads: int = 1
    warm_up: int = 3
    steps: int = 15


@dataclass(frozen=True)
class Result:
    """Medians over `case.steps` steps; memory is the peak of the whole process, with its libraries.

    On a busy machine compare `cpu_ms`, the processor time of all threads, which leaves out the wait for a core.
    """

    case: Case
    step_ms: float
    cpu_ms: float
    tokens_per_s: float
    peak_rss_mb: float
    load: float


def main(
    sizes: Annotated[list[str], typer.Argument(help="LENGTHxBATCH each.")] = ["1024x1", "512x4"],  # noqa: B006
    strategy: str = "eagle3",
    ttt: int = 7,
    loss: str = "token_mean",
    steps: int = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here too.")] = None,
    one_case: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure one training step at every size; prints a table, and one JSON line per size."""
    if one_case is not None:
        print(json.dumps(asdict(measure(Case(**json.loads(one_case))))))
        return
    mode = TypeAdapter(Loss).validate_python(loss)
    results = []
    for size in sizes:
        length, batch = (int(part) for part in size.split("x"))
        results.append(
            _in_own_process(replace(Case(length, batch), strategy=strategy, ttt=ttt, loss=mode, steps=steps))
        )
    print(table(results))
    lines = [json.dumps(result) for result in results]
    print("\n".join(lines))
    if json_file is not None:
        json_file.write_text("\n".join(lines) + "\n")


def measure(case: Case) -> Result:
    """Run the steps in this process."""
    import torch

    torch.set_num_threads(case.threads)
    strategy, batch = prepare(case)
    optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    wall, cpu = [], []
    for _ in range(case.warm_up + case.steps):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        train_step(strategy, batch, optimizer)
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    median = statistics.median(wall[case.warm_up :])
    return Result(
        case=case,
        step_ms=round(median * 1e3, 1),
        cpu_ms=round(statistics.median(cpu[case.warm_up :]) * 1e3, 1),
        tokens_per_s=round(case.length * case.batch / median),
        peak_rss_mb=round(peak_rss_mb()),
        load=round(os.getloadavg()[0], 2),
    )


def prepare(case: Case) -> tuple[DraftStrategy, TrainBatch]:
    """Return a draft of a synthetic target, and one padded batch of random features."""
    strategy, samples = prepare_samples(case)
    return strategy, strategy.collate(samples, [str(i) for i in range(case.batch)])


def prepare_samples(case: Case) -> tuple[DraftStrategy, list[dict[str, Tensor]]]:
    """Return a draft of a synthetic target, and samples of random tokens and features."""
    import torch

    generator = torch.Generator().manual_seed(0)
    strategy = made_up_draft(case, made_up_target(case, generator))
    samples = []
    for _ in range(case.batch):
        sample = {n: torch.randn(case.length, case.hidden, generator=generator) for n in strategy.feature_names}
        sample["input_ids"] = torch.randint(case.vocab, (case.length,), generator=generator)
        sample["loss_mask"] = torch.arange(case.length) >= round(case.length * (1 - case.loss_share))
        samples.append(sample)
    return strategy, samples


def made_up_target(case: Case, generator: Generator) -> TargetParts:
    import torch

    from draftworks.drafts.target_parts import TargetParts

    head = torch.randn(case.vocab, case.hidden, generator=generator)
    head[case.draft_vocab :] *= 0.01
    return TargetParts(
        hidden_size=case.hidden,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.hidden // case.heads,
        intermediate_size=case.intermediate,
        rms_norm_eps=1e-6,
        vocab_size=case.vocab,
        num_layers=8,
        max_positions=case.length,
        embedding=torch.randn(case.vocab, case.hidden, generator=generator),
        head=head,
    )


def made_up_draft(case: Case, target: TargetParts) -> DraftStrategy:
    """Return the case's draft; a reduced vocabulary is of the lowest ids."""
    import numpy as np

    from draftworks.config.strategies import resolve_strategy
    from draftworks.data.vocab import VocabMapping

    spec, vocabulary = resolve_strategy(case.strategy), None
    if spec.uses_vocab_mapping:
        vocabulary = VocabMapping(np.zeros(case.draft_vocab, np.int64), np.arange(case.vocab) < case.draft_vocab)
    return spec.load_factory()(made_up_options(case), target, vocabulary, 0)


def made_up_options(case: Case) -> StrategyOptions:
    """Return the case's options of its strategy."""
    from draftworks.config.strategies import resolve_strategy

    spec = resolve_strategy(case.strategy)
    wanted = {
        "loss": case.loss,
        "draft_vocab_size": case.draft_vocab,
        "ttt_length": case.ttt,
        **STRATEGIES[case.strategy],
    }
    known = {name: value for name, value in wanted.items() if name in spec.options.model_fields}
    return spec.parse_options(known, where=f"options of {case.strategy}")


BLOCKS = {"block_size": 8, "num_anchors": 64, "num_layers": 2, "num_taps": 3}
STRATEGIES: dict[str, dict[str, int]] = {
    "eagle3": {},
    "peagle": {},
    "dflash": BLOCKS,
    "domino": {**BLOCKS, "emb_dim": 32, "gru_hidden_dim": 64},
    "dspark": {**BLOCKS, "markov_rank": 32},
    "dflash2": {**BLOCKS, "selector_rank": 32},
    "lilicorr": {**BLOCKS, "lattice_size": 64},
    "xpress": {**BLOCKS, "refiner_rank": 32},
}
"""Options by strategy, beside those of a `Case`. MTP's draft is a part of the target's own files."""


def train_step(strategy: DraftStrategy, batch: TrainBatch, optimizer) -> None:
    """Run an optimizer step of one micro-batch."""
    import torch

    take_gradients(strategy, batch)
    torch.nn.utils.clip_grad_norm_(strategy.model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def take_gradients(strategy: DraftStrategy, batch: TrainBatch) -> StepOutput:
    """Run forward and backward of the mean loss, at a step where both losses of Domino have the same weight."""
    from draftworks.drafts.strategy import StepContext

    output = strategy.forward_loss(batch, StepContext(global_step=1, total_steps=4, training=True))
    (output.loss_sum / output.loss_weight).backward()
    return output


def peak_rss_mb() -> float:
    """Return the peak memory of this program image; `ru_maxrss` would count the parent's memory before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def table(results: list[dict]) -> str:
    lines = [
        f"{'size':>8} {'strategy':>8} {'ttt':>4} {'loss':>11} {'ms/step':>8} {'cpu ms':>7} {'tokens/s':>9} {'peak MB':>8} {'load':>5}"
    ]
    for result in results:
        case = result["case"]
        size = f"{case['length']}x{case['batch']}"
        lines.append(
            f"{size:>8} {case['strategy']:>8} {case['ttt']:>4} {case['loss']:>11} {result['step_ms']:>8} {result['cpu_ms']:>7} "
            f"{result['tokens_per_s']:>9} {result['peak_rss_mb']:>8} {result['load']:>5}"
        )
    return "\n".join(lines)


def _in_own_process(case: Case) -> dict:
    command = [sys.executable, __file__, "--one-case", json.dumps(asdict(case))]
    environment = os.environ | {"OMP_NUM_THREADS": str(case.threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    typer.run(main)
