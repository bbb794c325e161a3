"""Greedy speculative decoding of an exported EAGLE-3 draft in plain torch, beside the walk and the loop of its report.

    python benchmarks/plain_loop.py short --registry registry/examples/smollm2 --prompts 10

An independent reading of what the draft is worth: `Draft` and `speculate` know the export's files (`sglang_eagle3`) and
transformers, and share no code with the project, which only says where things are. Prints a line for each prompt, with
how many passes accepted 0, 1, 2, … tokens in each of the three, and exits with 1 if they differ.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, cast

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.data.tokenized import TokenizedSet
from draftworks.evaluation.report.summary import PROMPTS
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.storage.names import HELDOUT_RESPONSES, of_strategy
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target

WALK, LOOP = "rung3_walk_acc_len", "rung4_loop_acc_len_t0"


class Draft:
    """An EAGLE-3 draft as SGLang's files have it, at work on one sequence. `reach`: tokens that it has in its cache for good."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.w = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
        self.embed = self.w.get("embed_tokens.weight", cast(Tensor, model.get_input_embeddings().weight))
        self.taps = [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self.eps = config.get("head_dim") or config["hidden_size"] // self.heads, config["rms_norm_eps"]
        self.theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.keys = self.values = torch.zeros(self.kv_heads, 0, self.dim)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor, first: int) -> Tensor:
        places = torch.arange(first, first + x.shape[1])[:, None]
        angles = (places / self.theta ** (torch.arange(0, self.dim, 2) / self.dim)).repeat(1, 2)
        turned = torch.cat([-x[..., self.dim // 2 :], x[..., : self.dim // 2]], -1)
        return x * angles.cos() + turned * angles.sin()

    def step(self, tokens: list[int], state: Tensor) -> tuple[int, Tensor]:
        """Read tokens with the states before them; return the next token and the state to go on with, (1, H)."""
        layer, known, n = "midlayer.self_attn", self.keys.shape[1], len(tokens)
        both = [self.norm(self.embed[tokens], "midlayer.input_layernorm"), self.norm(state, "midlayer.hidden_norm")]
        q, k, v = (F.linear(torch.cat(both, -1), self.w[f"{layer}.{name}_proj.weight"]) for name in "qkv")
        q, k, v = (x.view(n, -1, self.dim).transpose(0, 1) for x in (q, k, v))
        self.keys = torch.cat([self.keys, self.rotate(k, known)], 1)
        self.values = torch.cat([self.values, v], 1)
        seen = torch.ones(n, known + n, dtype=torch.bool).tril(known)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 0) for x in (self.keys, self.values))
        read = F.scaled_dot_product_attention(self.rotate(q, known), k, v, attn_mask=seen)
        state = state + F.linear(read.transpose(0, 1).reshape(n, -1), self.w[f"{layer}.o_proj.weight"])
        x = self.norm(state, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(x, self.w[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        state = (state + F.linear(F.silu(gate) * up, self.w["midlayer.mlp.down_proj.weight"]))[-1:]
        best = int(F.linear(self.norm(state, "norm"), self.w["lm_head.weight"]).argmax())
        return best + int(self.w["d2t"][best]), state

    def propose(self, tokens: list[int], taps: Tensor, count: int) -> list[int]:
        """Return `count` tokens after these, which the target has read all but the last of; taps: (n, 3 H)."""
        token, state = self.step(tokens, F.linear(taps, self.w["fc.weight"]))
        kept, proposal = (self.keys, self.values), [token]
        while len(proposal) < count:
            token, state = self.step([token], state)
            proposal.append(token)
        self.keys, self.values = kept
        return proposal


@torch.no_grad()
def speculate(
    model: PreTrainedModel, draft: Draft, prompt: list[int], count: int, limit: int, ends: set[int]
) -> list[int]:
    """Return how many proposed tokens each pass accepts, until an end of text or `limit` tokens."""
    cache, accepted, answer, read = DynamicCache(config=model.config), [], [], prompt
    while True:
        out = model(torch.tensor([read]), past_key_values=cache, output_hidden_states=True)
        best, proposal = out.logits[0].argmax(-1).tolist(), read[1:] if answer else []
        best = best if answer else best[-1:]
        right = next((i for i, token in enumerate(proposal) if token != best[i]), len(proposal))
        got = best[: right + 1]
        ended = next((i for i, token in enumerate(got) if token in ends), len(got))
        if answer:
            accepted.append(min(right, ended + 1, limit - len(answer)))
        got = got[: ended + 1][: limit - len(answer)]
        answer += got
        if answer[-1] in ends or len(answer) == limit:
            return accepted
        states = torch.cat([out.hidden_states[tap][0] for tap in draft.taps], -1)
        first = len(accepted) == 0
        if right < len(proposal):
            cache.crop(right - len(proposal))
        states = states if first else states[: right + 1]
        read = [answer[-1], *draft.propose([*prompt[1:], *got] if first else got, states, count)]


def main(
    target: str,
    registry: Annotated[Path, typer.Option()] = Path("registry"),
    strategy: Annotated[str, typer.Option()] = "eagle3",
    prompts: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    found = Registry(registry)
    spec, results = found.load_target(target), ArtifactStore(found.resolve_var_folder())
    report = results.load_current(of_strategy(strategy).report, target)
    export = results.load_current(of_strategy(strategy).export, target)
    folder = resolve_target(spec, found, FileDigests()).model
    llm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    ends = llm.generation_config.eos_token_id
    counted = read_counts(next(report.path.rglob(PROMPTS)))
    different = 0
    for sample, tokens in list(
        read_prompts(results.load_current(HELDOUT_RESPONSES, target).path / TOKENS_FOLDER).items()
    )[:prompts]:
        begin = time.process_time()
        ends_of_text = {ends} if isinstance(ends, int) else set(ends)
        count = report.summary["draft_tokens"]
        limit = min(spec.responses.max_new_tokens, spec.max_length - len(tokens))
        draft = Draft(export.path / "sglang_eagle3", llm)
        here = Counter(speculate(llm, draft, tokens, count, limit, ends_of_text))
        rows = {
            "plain": [here[number] for number in range(count + 1)],
            **{
                name: [*counted[metric, sample], *[0] * (count + 1)][: count + 1]
                for name, metric in (("walk", WALK), ("loop", LOOP))
                if (metric, sample) in counted
            },
        }
        different += len({tuple(row) for row in rows.values()}) > 1
        print(json.dumps({"sample": sample[:12], **rows, "cpu_s": round(time.process_time() - begin, 1)}), flush=True)
    print(f"{prompts - different} of {prompts} prompts agree count for count")
    raise typer.Exit(different > 0)


def read_counts(path: Path) -> dict[tuple[str, str], list[int]]:
    """Return how many passes accepted 0, 1, 2, … tokens, by metric and sample, of the trained draft."""
    rows = pq.read_table(path).to_pylist()
    return {(row["metric"], row["sample_id"]): row["histogram"] for row in rows if row["draft"] == "trained"}


def read_prompts(folder: Path) -> dict[str, list[int]]:
    """Return the tokens before the answer by sample id, of samples with one answer."""
    prompts = {}
    for row in TokenizedSet.open(folder):
        begin = int(row.loss_mask.argmax())
        if row.loss_mask[begin:].all():
            prompts[row.sample_id] = row.input_ids[:begin].tolist()
    return dict(sorted(prompts.items()))


if __name__ == "__main__":
    typer.run(main)
