"""Entries of generations that can be told apart, and a process that produces them, to be raced with or killed.

python eval_cache_producer.py CACHE_DIR once    waits for the file CACHE_DIR/go, then gets or produces one entry
python eval_cache_producer.py CACHE_DIR churn   replaces and invalidates the entry until it is killed
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from draftworks.evaluation.eval_cache import EvalCache, EvalConfig

CONFIG = EvalConfig("evals/chat.jsonl", "org/model", aux_hidden_state_layer_ids=(1, 3, 4))
FILES = ("refs.jsonl", "manifest.json", "deep/rows.txt")
GO, LOG = "go", "productions.log"
CHURN_PAUSE = 0.001


def writer(generation: int, pause: float = 0.0) -> Callable[[Path], None]:
    """A producer whose files all say which generation they are of; it takes a pause after each."""

    def produce(folder: Path) -> None:
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{generation}\n" * 20)
            time.sleep(pause)

    return produce


def inputs_of(generation: int) -> dict[str, str]:
    return {"eval_data": f"data-{generation}", "target": "model-0"}


def generation_in(folder: Path) -> int:
    """The generation of an entry; an error if a file is missing or cut, or they are not of one generation."""
    texts = {(folder / name).read_text() for name in FILES}
    assert len(texts) == 1, texts
    lines = texts.pop().split()
    assert len(lines) == 20
    return int(lines[0])


def once(cache: EvalCache) -> None:
    """One call, as close to that of another process as can be; what came of it goes to standard output as JSON."""

    def produce(folder: Path) -> None:
        with (cache.cache_dir / LOG).open("a") as file:
            file.write(f"{os.getpid()}\n")
        writer(0, pause=0.1)(folder)

    while not (cache.cache_dir / GO).exists():
        time.sleep(0.001)
    entry = cache.get_or_produce(CONFIG, produce, inputs_of(0))
    print(json.dumps({**asdict(entry), "path": str(entry.path), "generation": generation_in(entry.path)}))


def churn(cache: EvalCache) -> None:
    for generation in itertools.count():
        cache.get_or_produce(CONFIG, writer(generation, CHURN_PAUSE), inputs_of(generation))
        if generation % 3 == 2:
            cache.invalidate(CONFIG)


if __name__ == "__main__":
    print("ready", flush=True)
    {"once": once, "churn": churn}[sys.argv[2]](EvalCache(Path(sys.argv[1])))
