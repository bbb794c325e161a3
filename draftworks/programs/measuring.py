"""`draftworks plan TARGET --measure`: choose prompts of a target's data, and start the program that answers them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

from draftworks.config.run_files import MeasureRun, TargetFiles
from draftworks.data.conversations import Conversation, read_conversations, write_conversations
from draftworks.errors import ConfigError, EngineError
from draftworks.planning.data_sample import sample_conversations
from draftworks.planning.identities import TRAIN
from draftworks.planning.lengths import TextSize
from draftworks.planning.measured import identify_sample, locate_sample
from draftworks.planning.subject import PlanSubject
from draftworks.preflight.compatibility import check_requirements
from draftworks.programs.start import CHECKOUT
from draftworks.storage.identity import FileDigests
from draftworks.storage.names import CONVERSATIONS, HELDOUT
from draftworks.targets.gguf_store import ensure_converted
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import collect_taps, digest_training_data, make_greedy_settings

PROMPTS = 20
LIMIT_S = 60.0
"""Of answers; loading the engine and capturing come in addition."""
_FIRST = 2000
"""Prepared conversations that the prompts are chosen from; their order is that of a hash or of the data."""


def measure_target(name: str, registry: Registry, prompts: int = PROMPTS, limit_s: float = LIMIT_S) -> Path:
    """Answer a few prompts of a target's data with its engine, and return the file that lengths and speeds are in.

    Weights and data are read for their digests, as a first run does.

    Raises:
        ConfigError: the entry has a mistake, or its data has no prompts that could be read here.
        EngineError: the program failed; its own output says why.
    """
    target = registry.load_target(name)
    var = registry.resolve_var_folder()
    digests = FileDigests(var / "digests.json")
    ensure_converted(target, registry, digests, lambda line: print(line, file=sys.stderr))
    files = resolve_target(target, registry, digests)
    check_requirements(target, files, registry)
    remote = PlanSubject.of(name, registry).is_remote(HELDOUT)
    data = None if remote else digest_training_data(target, registry, digests)
    chosen = _choose_prompts(PlanSubject.of(name, registry), prompts)
    settings = (
        target.responses if target.responses.mode == "regenerate" else make_greedy_settings(target, "conversations")
    )
    identity = identify_sample(target, files, data, settings.to_identity())
    record = locate_sample(var, identity)
    with tempfile.TemporaryDirectory(prefix="draftworks-measure-") as scratch:
        folder = Path(scratch)
        write_conversations(folder / "asked", chosen)
        deployment = registry.load_deployment()
        pythons = {
            name: os.path.abspath(registry.root / getattr(deployment, name).python) for name in ("sglang", "vllm")
        }
        run = MeasureRun(
            out=folder,
            target=files,
            conversations=folder / "asked",
            answers=folder / "answers",
            responses=settings,
            max_rejected_share=1.0,
            max_length=target.max_length,
            capture=target.capture,
            sglang=deployment.sglang.model_copy(update={"python": pythons["sglang"]}),
            vllm=deployment.vllm.model_copy(update={"python": pythons["vllm"]}),
            taps=collect_taps(target, files.num_layers),
            limit_s=limit_s,
            prompt_tokens=_estimate_prompt(chosen, files),
            record=record,
            identity=identity,
        )
        inside = target.capture.inside if not settings.endpoint else None
        _run_program(pythons[inside] if inside else sys.executable, run.save(folder / "measure.yaml"), name)
    return record


def _run_program(python: str, run_file: Path, name: str) -> None:
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [python, "-m", "draftworks.programs.measure", str(run_file)]
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise EngineError(f"target {name}: measuring ended with exit code {done.returncode}; the lines above say why")


def _choose_prompts(subject: PlanSubject, most: int) -> list[Conversation]:
    """Return conversations of a target's training data: of the prepared ones, else of rows of its files."""
    prepared = subject.anywhere.find(CONVERSATIONS)
    if prepared is not None and prepared.summary.get("kind") == "conversations":
        found = list(islice(read_conversations(prepared.path / TRAIN), _FIRST))
    else:
        names, registry = subject.target.training_datasets, subject.registry
        each = -(-most // len(names))
        found = [
            one for name in names for one in sample_conversations(registry.load_dataset(name), registry.root, each)
        ]
    if not found:
        raise ConfigError(
            f"target {subject.target.name}: --measure found no prompts: the data lies elsewhere, is a log, or has token ids. Of "
            f"data elsewhere and logs, run first: draftworks run prepare --target {subject.target.name}"
        )
    unique = list({one.id: one for one in found}.values())
    return unique if len(unique) <= most else random.Random(0).sample(unique, most)


def _estimate_prompt(chosen: list[Conversation], files: TargetFiles) -> float:
    texts = [turn.content for one in chosen for turn in one.turns if turn.role != "assistant"]
    return sum(TextSize.of(text).count_tokens(files.vocab_size).value for text in texts) / len(chosen)
