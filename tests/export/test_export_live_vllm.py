"""Real vLLM on a CPU serves our exports by the commands that we print, and accepts what the walk said, pass by pass."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_process import PeerJudge
from ladder_toys import TAPS, TTT, Answers, Ladder, MakeDraft, build_ladder, greedy_answers, make_draft
from mtp_toys import mtp, save_target_with_mtp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.draft_io import save_draft
from draftworks.evaluation.ladder.decoding import add_gap
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace, Pass, first_difference
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import DRAFT_FOLDER
from draftworks.export.exporting import export_draft

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPTS, LONGEST, NEAR_TIE = 6, 32, 1e-3
ENGINE = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--seed", "0"),
    *("--generation-config", "vllm"),
]
COUNTED = ["--per-request-spec-decode-metrics", "detailed"]
STEPS = 80
"""Of a training on the very prompts: where nothing is accepted, all counts are equal."""
DRAFTS: dict[str, MakeDraft] = {
    "eagle3": partial(make_draft, "eagle3"),
    "dflash": partial(make_draft, "dflash", num_layers=1, sliding_window=None, sliding_layers=None),
    "peagle": partial(make_draft, "peagle"),
    "mtp": partial(mtp, num_steps=TTT),
}
"""DFlash's has one layer: 0.32's kernel for CPUs norms the context's keys of all layers with the weights of the first."""
FORMATS = {
    "speculators_eagle3": "eagle3",
    "speculators_dflash": "dflash",
    "zlab_dflash": "dflash",
    "speculators_peagle": "peagle",
}
HEADS_ON_A_CPU = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
"""vLLM's kernel for latent attention on a CPU has one size, DeepSeek's own."""


@dataclass(frozen=True)
class Export:
    """An export, its printed commands, and the ladder of its draft."""

    folder: Path
    commands: dict[str, str]
    ladder: Ladder


@dataclass(frozen=True, eq=False)
class Site:
    """A target with its greedy answers, and drafts that were trained on these."""

    folder: Path
    target: TargetFiles
    answers: Answers
    judge: PeerJudge
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @cache  # noqa: B019
    def teach(self, strategy: str) -> Ladder:
        """Train a draft, and save it as it is served, in float32; the walk is in the target's dtype."""
        made = build_ladder(self.answers, self.target, STEPS, DRAFTS[strategy])
        made.strategy.model.float()
        save_draft(self.folder / strategy, made.strategy, self.target.digest)
        made.strategy.model.to(self.answers.model.dtype)
        return made

    def export(self, strategy: str, name: str) -> Export:
        ladder, out = self.teach(strategy), self.folder / name
        made = export_draft(CanonicalDraft.load(self.folder / strategy, self.target), name, out, "float32")
        commands = {server: command.replace(DRAFT_FOLDER, str(out)) for server, command in made.commands.items()}
        return Export(out, commands, ladder)

    def serve(self, command: str, *more: str) -> list[dict[str, Any]]:
        """Return what vLLM answers to each prompt, and what it counted."""
        asked = self.folder / f"asked-{next(self._numbers)}"
        asked.mkdir()
        prompts = [sample.prompt for sample in self.answers.samples]
        question = {"command": command, "more": [*ENGINE, *more], "prompts": prompts, "max_tokens": LONGEST}
        (asked / "asked.json").write_text(json.dumps(question))
        [found] = self.judge.ask("live", [asked])
        return found


@pytest.fixture(scope="module")
def site(
    tiny_target: TargetFiles, tiny_folder: Path, vllm_judge: PeerJudge, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    answers = greedy_answers(tiny_folder, PROMPTS, LONGEST)
    return Site(tmp_path_factory.mktemp("vllm"), tiny_target, answers, vllm_judge)


def trace(answer: dict[str, Any]) -> AnswerTrace:
    """An answer of vLLM as the walk counts one: the last pass may have accepted tokens beyond the end."""
    left, passes = len(answer["ids"]) - 1, []
    for accepted in answer["accepted"]:
        passes.append(Pass(min(accepted, left), min(accepted + 1, left)))
        left -= passes[-1].emitted
    assert left == 0, "passes and tokens contradict each other"
    return AnswerTrace(tuple(answer["ids"]), tuple(passes))


def require_served_as_walked(ladder: Ladder, served: list[dict[str, Any]]) -> None:
    """Require the same answers, and the same accepted tokens of each pass, but for near ties, each of which is shown."""
    names = {sample.name for sample in ladder.samples}
    walked = replay_all(ladder.strategy, [ladder.batch(ladder.samples)], TTT, torch.device("cpu"), names)
    walks = {one.walk.sample_id: one.first_answer for one in walked}
    differences = []
    for sample, answer in zip(ladder.samples, served, strict=True):
        assert set(answer["proposed"]) == {TTT}
        walk, seen = walks[sample.name], trace(answer)
        assert walk is not None
        found = first_difference(sample.name, walk, seen)
        if found is not None:
            differences.append(add_gap(found, ladder.model, ladder.strategy, TAPS, sample.prompt, seen.answer))
    assert all(each.gap is not None and each.gap < NEAR_TIE for each in differences), differences
    assert len(differences) < 2, differences
    accepted, passes = (
        sum(map(of, served)) for of in (lambda one: sum(one["accepted"]), lambda one: len(one["accepted"]))
    )
    assert accepted > passes / 4  # equal counts of nothing would say little


def test_without_a_draft_the_answers_are_those_of_the_drafts_training(site: Site):
    served = site.serve(f"vllm serve {site.target.model}")
    assert [tuple(one["ids"]) for one in served] == [sample.answer for sample in site.answers.samples]


@pytest.mark.parametrize("name", FORMATS)
def test_a_live_server_accepts_what_the_walk_said(site: Site, name: str):
    export = site.export(FORMATS[name], name)
    require_served_as_walked(export.ladder, site.serve(export.commands["vLLM, target first"], *COUNTED))


def test_sglangs_folder_feeds_vllm_the_layers_that_the_draft_was_trained_on(site: Site):
    """No command for vLLM is printed for it; who serves it all the same loses nothing."""
    export = site.export("eagle3", "sglang_eagle3")
    assert list(export.commands) == ["SGLang"]
    [command] = [
        line for line in site.export("eagle3", "speculators_eagle3").commands.values() if str(site.folder) in line
    ]
    served = site.serve(command.replace("speculators_eagle3", "sglang_eagle3"), *COUNTED)
    require_served_as_walked(export.ladder, served)


def blank_token(folder: Path, token: int) -> None:
    """Make a token's embedding zeros."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_live_server_accepts_what_the_walk_said_of_a_tuned_layer_of_the_targets_own(
    tiny_folder: Path, site: Site, vllm_judge: PeerJudge, tmp_path: Path
):
    """DeepSeek-V3's; on a CPU vLLM serves no target with linear attention beside a draft.

    vLLM's class, and Qwen's not, takes zeros for the token that the layer reads at the first position. Here that token's embedding
    is zeros, so that all else can be compared.
    """
    target = save_target_with_mtp("deepseek_v3", tmp_path / "target", **HEADS_ON_A_CPU)
    [second] = {sample.prompt[1] for sample in site.answers.samples}
    blank_token(tmp_path / "target", second)
    # transformers has no kernel in float64 for its experts
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    tuned = Site(tmp_path, target, greedy_answers(tiny_folder, 4, LONGEST, model), vllm_judge)
    export = tuned.export("mtp", "target_mtp")
    require_served_as_walked(export.ladder, tuned.serve(export.commands["vLLM, target first"], *COUNTED))
