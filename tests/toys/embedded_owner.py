"""A process with SGLang inside, run by SGLang's Python, for the tests that ask it and kill it.

Reads `{"target", "folder", "prompts", "new_tokens"}` from its first line of input, prints the answers to all prompts, asked
at the same time, and lives until its input ends.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    target = TargetFiles.model_validate(asked["target"])
    capture = CaptureSpec(backend="sglang", compute_dtype="float32", device="cpu")
    engine = load_engine(target, capture, torch.device("cpu"), EnginePlace(Path(asked["folder"])))
    sampling = ResponseSpec(max_new_tokens=asked["new_tokens"])

    def answer(prompt: list[int]) -> list[int]:
        return list(engine.generate([prompt], sampling, ["a"], target.context)[0].ids)

    with ThreadPoolExecutor(len(asked["prompts"])) as pool:
        answers = list(pool.map(answer, asked["prompts"]))
    print(json.dumps(answers), flush=True)
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main()
