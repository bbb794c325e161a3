"""Asks the code of a peer about exports, in a process of the peer's own environment: see judges.py."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import ending

SCRIPT = Path(__file__).with_name("judges.py")
TAIL = 2000


@dataclass(frozen=True)
class Peer:
    """A peer's environment, and the judges that run in it.

    Attributes:
        name: of the environment, and what the names of its judges' modules begin with.
        judges: of a module each, {name}_{judge}_judge.
        variables: environment variables.
    """

    name: str
    judges: tuple[str, ...]
    variables: Mapping[str, str]


SGLANG = Peer(
    "sglang",
    ("config", "dflash2", "domino", "dspark", "lilicorr", "mtp"),
    {
        "TORCHDYNAMO_DISABLE": "1",  # the same without a compiler
        "TRITON_INTERPRET": "1",  # the output gate of Qwen's attention is written in Triton
        "SGLANG_RAGGED_VERIFY_MODE": "compact",  # read by SGLang, which by default leaves DSpark's confidences out
    },
)
VLLM = Peer(
    "vllm",
    ("blocks", "live"),
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the fork that answers
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    },
)


@dataclass(frozen=True)
class PeerJudge:
    """One process for all judges of a peer."""

    peer: Peer
    process: subprocess.Popen[str]
    work: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, judge: str, folders: Sequence[Path]) -> list[Any]:
        """Return what one of the judges finds in each folder."""
        work = self.work / f"{judge}-{next(self._numbers)}"
        work.mkdir()
        module = f"{self.peer.name}_{judge}_judge"
        asked = {"judge": module, "folders": [str(folder) for folder in folders], "work": str(work)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # then it has ended, see below
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        code = self.process.stdout.readline().strip()
        assert code, f"the judge has ended: {(self.work / 'judge.log').read_text()[-TAIL:]}"
        assert code == "0", (work / "judge.log").read_text()[-TAIL:]
        return json.loads((work / "found.json").read_text())


@contextmanager
def running_judge(peer: Peer, environments: Path, work: Path) -> Iterator[PeerJudge]:
    """Start it; it imports the peer while the first question is prepared.

    Args:
        environments: the folder that has `.venv-{peer}`.
    """
    python = environments / f".venv-{peer.name}" / "bin" / "python"
    with (work / "judge.log").open("w") as log:
        process = subprocess.Popen(
            [python, SCRIPT, *(f"{peer.name}_{judge}_judge" for judge in peer.judges)],
            env={**os.environ, **peer.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with ending(process):
        yield PeerJudge(peer, process, work)
