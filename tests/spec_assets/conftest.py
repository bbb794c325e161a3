"""A small registry around the tiny target, and one complete run over it that many tests share."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest
from built_once import find_or_make
from recorded_reads import recorded_reads

from spec_assets.code_location import build_definitions

TARGET = """
model: {model}
dataset: chats
max_length: 96
data: {{held_out_share: 0.2, workers: 1}}
responses: {{max_new_tokens: 16, batch_size: 32}}
evaluation: {{loop: {{prompts: 2}}}}
capture: {{dtype: float32, compute_dtype: float32, device: cpu, batch_tokens: 2048, budget_gb: 1}}
strategies:
  eagle3:
    options: {{ttt_length: 2, draft_vocab_size: 256}}
    training: {{processes: {processes}, global_batch_size: 8, micro_batch_size: 4, epochs: 3, lr: 0.002, compute_dtype: float32,
                device: cpu, log_every: 2}}
"""


@dataclass(frozen=True)
class Site:
    """A registry with one target, `small`, and all results that are made from it."""

    root: Path
    tiny_folder: Path

    @property
    def registry(self) -> Path:
        return self.root / "registry"

    @property
    def var(self) -> Path:
        return self.root / "var"

    @property
    def target_file(self) -> Path:
        return self.registry / "targets" / "small.yaml"

    @property
    def chats(self) -> Path:
        return self.registry / "chats.jsonl"

    def definitions(self) -> dg.Definitions:
        return build_definitions(self.registry)

    def run(self, job: str = "everything", partition: str = "small", **options) -> dg.ExecuteInProcessResult:
        """Run a job in this process."""
        found = self.definitions().resolve_job_def(job)
        return found.execute_in_process(partition_key=partition, raise_on_error=False, **options)

    def evaluate(self, asked: str) -> None:
        """Give the target another `evaluation`, in YAML."""
        text = self.target_file.read_text()
        self.target_file.write_text(re.sub("^evaluation: .*$", f"evaluation: {asked}", text, flags=re.MULTILINE))

    def copy(self, root: Path) -> Site:
        shutil.copytree(self.root, root, dirs_exist_ok=True)
        return Site(root, self.tiny_folder)

    def write_chats(self, count: int) -> None:
        """The first `count` conversations of the corpus, one question and answer each."""
        rows = pq.read_table(self.tiny_folder / "corpus.parquet").slice(0, count).to_pylist()
        chats = [{"messages": row["messages"][:2], "task": row["task"]} for row in rows]
        self.chats.write_text("".join(json.dumps(chat) + "\n" for chat in chats))

    def module(self) -> Path:
        """Write a code location for the command line and return its path."""
        path = self.root / "location.py"
        path.write_text(
            "from pathlib import Path\nfrom spec_assets.code_location import build_definitions\n"
            "defs = build_definitions(Path(__file__).parent / 'registry')\n"
        )
        return path


def new_site(root: Path, tiny_folder: Path, processes: int = 1, conversations: int = 60) -> Site:
    site = Site(root, tiny_folder)
    for folder in ("targets", "datasets"):
        (site.registry / folder).mkdir(parents=True)
    site.target_file.write_text(TARGET.format(model=tiny_folder, processes=processes))
    (site.registry / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    site.write_chats(conversations)
    return site


@pytest.fixture
def site(tmp_path: Path, tiny_folder: Path) -> Site:
    """A fresh site on which nothing has run."""
    return new_site(tmp_path, tiny_folder)


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Site:
    """A site for all tests of a module."""
    return new_site(tmp_path_factory.mktemp("shared"), tiny_folder)


@dataclass(frozen=True)
class FinishedSite:
    site: Site
    result: dg.ExecuteInProcessResult
    instance: dg.DagsterInstance
    reads: dict[str, set[str]]
    """The assets that each asset read while it was made, by name."""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> FinishedSite:
    """`everything` has just run once, training on two ranks: for tests of what a run shows. Nobody may change it."""
    made: list[FinishedSite] = []
    find_or_make("finished", lambda folder: made.append(finish(new_site(folder, tiny_folder, processes=2))))
    return made[0] if made else finish(new_site(tmp_path_factory.mktemp("site"), tiny_folder, processes=2))


@pytest.fixture(scope="session")
def finished_site(tiny_folder: Path) -> Site:
    """The results of such a run, perhaps of an earlier session: for tests that go on from them, each in a copy."""

    def make(folder: Path) -> None:
        finish(new_site(folder, tiny_folder, processes=2)).instance.dispose()

    return Site(find_or_make("finished", make), tiny_folder)


def finish(site: Site) -> FinishedSite:
    """Run `everything`."""
    instance = dg.DagsterInstance.ephemeral()
    with recorded_reads() as reads:
        result = site.run(instance=instance)
    assert result.success, [e.message for e in result.all_events if e.is_failure]
    return FinishedSite(site, result, instance, reads)
