"""Asks SGLang's own code about exports, in a process of its own environment: see sglang_judge.py."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import ending

SCRIPT = Path(__file__).with_name("sglang_judge.py")
TAIL = 2000
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # the same without a compiler
    "TRITON_INTERPRET": "1",  # the output gate of Qwen's attention is written in Triton
    "SGLANG_RAGGED_VERIFY_MODE": "compact",  # read by SGLang, which by default leaves DSpark's confidences out
}


@dataclass(frozen=True)
class SGLangJudge:
    """One process for all judges."""

    process: subprocess.Popen[str]
    work: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, judge: str, folders: Sequence[Path]) -> list[Any]:
        """Return what one of the judges finds in each folder."""
        work = self.work / f"{judge}-{next(self._numbers)}"
        work.mkdir()
        asked = {"judge": judge, "folders": [str(folder) for folder in folders], "work": str(work)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # then it has ended, see below
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        code = self.process.stdout.readline().strip()
        assert code, f"the judge has ended: {(self.work / 'judge.log').read_text()[-TAIL:]}"
        assert code == "0", (work / "judge.log").read_text()[-TAIL:]
        return json.loads((work / "found.json").read_text())


@contextmanager
def running_judge(python: Path, work: Path) -> Iterator[SGLangJudge]:
    """Start it; it imports SGLang while the first question is prepared."""
    with (work / "judge.log").open("w") as log:
        process = subprocess.Popen(
            [python, SCRIPT],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with ending(process):
        yield SGLangJudge(process, work)
