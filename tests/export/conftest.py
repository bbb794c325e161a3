"""The embedded target's tensors, inputs of a proposal, and the real speculators library and SGLang to judge exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from export_toys import FORMATS, Toys
from judge_process import SGLANG, VLLM, PeerJudge, running_judge
from safetensors.torch import load_file
from speculators_judge import Case, Findings, Question, judge

from draftworks.export.exporting import export_draft
from draftworks.export.readers.reader import TargetTensors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_tensors(tiny_folder: Path) -> TargetTensors:
    embedding = load_file(tiny_folder / "model.safetensors")["model.embed_tokens.weight"]
    return TargetTensors(embedding, embedding)


@pytest.fixture(scope="session")
def question(tiny_tensors: TargetTensors) -> Question:
    """Nine positions of a text over three taps, and three tokens drawn after it."""
    generator = torch.Generator().manual_seed(7)
    vocab, width = tiny_tensors.embedding.shape
    tokens = torch.randint(vocab, (12,), generator=generator)
    return Question(torch.randn(9, 3 * width, generator=generator), tokens[:9], tokens[9:])


@pytest.fixture(scope="session")
def speculators_python() -> Path:
    """The interpreter of the real library's environment."""
    environment = ROOT / ".venv-speculators"
    if not (environment / "ready").exists():
        pytest.skip("no speculators environment: make speculators-env")
    return environment / "bin" / "python"


@pytest.fixture(scope="session")
def speculators_judge(
    speculators_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Sequence[Case]], dict[str, Findings]]:
    """Runs the real library on folders and returns its findings by name; in one process, as its import takes seconds."""

    def ask(cases: Sequence[Case]) -> dict[str, Findings]:
        return judge(speculators_python, cases, tmp_path_factory.mktemp("speculators"))

    return ask


@pytest.fixture(scope="session")
def sglang_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerJudge]:
    """SGLang's own code, imported once for all that ask it."""
    with running_judge(SGLANG, ROOT, tmp_path_factory.mktemp("sglang-judge")) as judge:
        yield judge


@pytest.fixture(scope="session")
def vllm_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerJudge]:
    """vLLM's own code, imported once for all that ask it."""
    with running_judge(VLLM, ROOT, tmp_path_factory.mktemp("vllm-judge")) as judge:
        yield judge


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """A target, a draft of each strategy by its name, and an export of it by that of each format, in fp32.

    DSpark's has a gated head. P-EAGLE's has an embedding of its own; `shared` is one that has the target's, of `shared-draft`.
    """
    made = Toys.make(tmp_path_factory.mktemp("importing"))
    for name, strategy in FORMATS.items():
        options = {"markov_head_type": "gated"} if strategy == "dspark" else {}
        export_draft(made.draft(strategy, name=strategy, **options), name, made.folder / name, "float32")
    shared = made.draft("peagle", name="shared-draft", train_embeddings=False)
    export_draft(shared, "speculators_peagle", made.folder / "shared", "float32")
    return made
