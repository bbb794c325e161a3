"""llama.cpp's own server loads our GGUF files by the command that we print, and accepts what the walk said, prompt by prompt.

Only sums of a request are counted there. A server proposes at most as many tokens as are left but one, so that a last token
which the walk counts as accepted may be the target's own there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_drafts import JUDGE_PYTHON, LLAMA_CPP, convert
from ladder_toys import TTT, Answers, Ladder, MakeDraft, build_ladder, greedy_answers, make_draft
from mtp_toys import mtp, save_target_with_mtp
from processes import ending
from transformers import AutoModelForCausalLM
from waiting import wait_until

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.draft_io import save_draft
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import DRAFT_FOLDER
from draftworks.export.exporting import export_draft
from draftworks.export.gguf_format import TARGET_FILE
from draftworks.servers.process import find_free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PROMPTS, LONGEST, STEPS = 6, 32, 80
WHOLE = {"sliding_window": None, "sliding_layers": None}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "dflash": WHOLE,
    "dflash2": {**WHOLE, "selector_top_k": 8},
    "dspark": {**WHOLE, "markov_head_type": "vanilla", "block_size": TTT},
}
ENGINE = ["--ctx-size", "512", "--parallel", "1", "--threads", "1", "--flash-attn", "off", "--metrics", "--no-warmup"]
EXACT = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]


@dataclass(frozen=True)
class Site:
    """The embedded target as llama.cpp's converter writes it, and its greedy answers in float64."""

    folder: Path
    target: TargetFiles
    answers: Answers

    @property
    def model(self) -> Path:
        return self.folder / "target.gguf"


@pytest.fixture(scope="module")
def site(tiny_target: TargetFiles, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    for needed in (LLAMA_CPP / "llama-server", JUDGE_PYTHON):
        if not needed.exists():
            pytest.fail(f"no {needed}: make {LLAMA_CPP.name}/ready {JUDGE_PYTHON.parents[1].name}/ready")
    folder = tmp_path_factory.mktemp("llama-cpp")
    convert(folder, tiny_folder)
    return Site(folder, tiny_target, greedy_answers(tiny_folder, PROMPTS, LONGEST))


def ask(url: str, body: dict[str, Any] | None = None) -> bytes:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def is_up(url: str) -> bool:
    try:
        return bool(ask(f"{url}/health"))
    except OSError:
        return False


@contextmanager
def serving(command: str, folder: Path) -> Iterator[str]:
    """Start a printed command, and yield the server's address."""
    port = find_free_port()
    program, *words = shlex.split(command)
    more = [*ENGINE, *EXACT, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "llama-server.log").open("w") as log:
        started = subprocess.Popen([LLAMA_CPP / program, *words, *more], stdout=log, stderr=log)
        with ending(started):
            url = f"http://127.0.0.1:{port}"
            wait_until(
                lambda: is_up(url), lambda: Path(log.name).read_text()[-2000:], possible=lambda: started.poll() is None
            )
            yield url


def teach(site: Site, strategy: str, steps: int, make: MakeDraft) -> Ladder:
    ladder = build_ladder(site.answers, site.target, steps, make)
    ladder.strategy.model.float()
    save_draft(site.folder / strategy, ladder.strategy, site.target.digest)
    return ladder


def walk(ladder: Ladder) -> dict[str, AnswerTrace]:
    """The walk over each answer."""
    names = {sample.name for sample in ladder.samples}
    ladder.strategy.model.to(ladder.model.dtype)
    walked = replay_all(ladder.strategy, [ladder.batch(ladder.samples)], TTT, torch.device("cpu"), names)
    found = {one.walk.sample_id: one.first_answer for one in walked}
    return {name: trace for name, trace in found.items() if trace is not None}


def serve(site: Site, ladder: Ladder, command: str) -> dict[str, dict[str, Any]]:
    """Ask for every answer; require the target's own tokens, and that the counters are the sums of the requests' counts."""
    counts = {}
    with serving(command, site.folder) as url:
        for sample in ladder.samples:
            body = {"prompt": list(sample.prompt), "n_predict": LONGEST, "temperature": 0, "return_tokens": True}
            answer = json.loads(ask(f"{url}/completion", body | {"cache_prompt": False}))
            assert tuple(answer["tokens"]) == sample.answer
            counts[sample.name] = answer["timings"]
        lines = ask(f"{url}/metrics").decode().splitlines()
    counters = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    for ours, theirs in {"draft_n": "draft", "draft_n_accepted": "accepted"}.items():
        total = sum(each[ours] for each in counts.values())
        assert counters[f"llamacpp:spec_decode_num_{theirs}_tokens_total"] == total
    return counts


def require_served_as_walked(site: Site, ladder: Ladder, strategy: str) -> None:
    draft, out = CanonicalDraft.load(site.folder / strategy, site.target), site.folder / f"gguf_{strategy}"
    made = export_draft(draft, f"gguf_{strategy}", out, "float32")
    command = made.commands["llama.cpp"].replace(DRAFT_FOLDER, str(out)).replace(TARGET_FILE, str(site.model))
    counts, walks, passes = serve(site, ladder, command), walk(ladder), 0
    for sample in ladder.samples:
        accepted = [each.accepted for each in walks[sample.name].passes]
        passes += len(accepted)
        ends_with_a_proposal = 1 + len(accepted) + sum(accepted) > len(sample.answer)
        possible = {sum(accepted), sum(accepted) - ends_with_a_proposal}
        assert counts[sample.name]["draft_n_accepted"] in possible, sample.name
    # Equal counts of nothing would say little.
    assert sum(each["draft_n_accepted"] for each in counts.values()) > passes / 4


@pytest.mark.parametrize("strategy", DRAFTS)
def test_a_live_server_accepts_what_the_walk_said(site: Site, strategy: str):
    make = partial(make_draft, strategy, **DRAFTS[strategy])
    require_served_as_walked(site, teach(site, strategy, STEPS, make), strategy)


def test_a_live_server_accepts_what_the_walk_said_of_a_tuned_layer_of_the_targets_own(site: Site, tmp_path: Path):
    target = save_target_with_mtp("qwen3_5", tmp_path / "target")
    convert(tmp_path, tmp_path / "target")
    # transformers computes linear attention in single precision, whatever the model's dtype is
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    tuned = Site(tmp_path, target, greedy_answers(Path(site.target.model), 4, LONGEST, model))
    require_served_as_walked(tuned, teach(tuned, "mtp", 45, partial(mtp, num_steps=TTT)), "mtp")
