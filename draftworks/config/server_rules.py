"""By which rule each server accepts the tokens of a draft above temperature 0. Torch-free.

Read in the wheels of vLLM 0.33.0 (0.32.0 has the same defaults) and SGLang 0.5.23; `source` names the module below the
package. At temperature 0 all of them accept a token if it is the target's likeliest. Not in the table: what gives other
answers than the target alone (vLLM's `fly`, SGLang's acceptance thresholds), or none at all (`synthetic`). Where SGLang has
no kernel that samples (CPU, XPU; ROCm without rejection sampling) it decodes greedily, whatever temperature is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftworks.config.decoding import AcceptanceRule

VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
UNKNOWN_SERVERS = "no server that is known"
_EAGLE = ("eagle3", "mtp")
_ONE_STEP = ("peagle", "dflash", "dflash2", "lilicorr", "dspark")


@dataclass(frozen=True)
class ServerRule:
    """The rule of one server for drafts of some strategies.

    Attributes:
        flags: what sets it; empty where it is what the server does unasked.
        usual: whether evaluations measure it unasked: all rules without flags, and those of a strategy's own switch.
        note: what else it needs.
    """

    server: str
    strategies: tuple[str, ...]
    flags: str
    rule: AcceptanceRule
    source: str
    note: str = ""
    own_switch: bool = False

    @property
    def usual(self) -> bool:
        return not self.flags or self.own_switch

    def describe(self) -> str:
        """Return the server, with what sets its rule."""
        return f"{self.server} with {self.flags}" if self.flags else self.server


SERVER_RULES = (
    ServerRule(
        VLLM,
        (*_EAGLE, *_ONE_STEP),
        "",
        "greedy_draft",
        "config/speculative.py: draft_sample_method greedy; v1/worker/gpu/spec_decode/speculator.py: sample_draft",
    ),
    ServerRule(
        VLLM,
        ("xpress",),
        "",
        "greedy_draft",
        "v1/worker/gpu/spec_decode/xpress/speculator.py: jacobi_refine_greedy",
        "the draft is greedy whatever the flags say; from 0.33 on",
    ),
    ServerRule(
        VLLM,
        (*_EAGLE, *_ONE_STEP),
        '"draft_sample_method": "probabilistic"',
        "rejection",
        "v1/worker/gpu/spec_decode/rejection_sampler_utils.py: _rejection_kernel",
    ),
    ServerRule(
        VLLM,
        (*_EAGLE, *_ONE_STEP),
        '"draft_sample_method": "probabilistic", "rejection_sample_method": "block"',
        "block",
        "v1/worker/gpu/spec_decode/rejection_sampler_utils.py: USE_BLOCK_VERIFICATION",
        "Model Runner V2; with a greedy draft `block` is `greedy_draft`",
    ),
    ServerRule(
        SGLANG,
        _EAGLE,
        "",
        "greedy_draft",
        "srt/speculative/eagle_utils.py: eagle_sample, tree_speculative_sampling_target_only",
    ),
    ServerRule(
        SGLANG,
        ("mtp",),
        "ROCm",
        "rejection",
        "srt/arg_groups/speculative_hook.py: _should_auto_enable_hip_rejection_sampling",
        "unasked there, for --speculative-algorithm EAGLE and NEXTN",
    ),
    ServerRule(
        SGLANG,
        _EAGLE,
        "--speculative-use-rejection-sampling",
        "rejection",
        "srt/speculative/eagle_utils.py: chain_speculative_sampling_triton",
        "refused for a draft with a reduced vocabulary; --speculative-eagle-topk 1",
    ),
    ServerRule(
        SGLANG,
        _EAGLE,
        "--speculative-use-block-verification",
        "block",
        "srt/arg_groups/speculative_hook.py: handle_speculative_decoding",
        "CUDA and ROCm; it sets --speculative-use-rejection-sampling",
    ),
    ServerRule(
        SGLANG,
        ("dflash", "domino"),
        "",
        "greedy_draft",
        "srt/speculative/dflash_utils.py: compute_dflash_sampling_correct_drafts_and_bonus",
        "no flag changes it",
    ),
    ServerRule(
        SGLANG,
        ("dflash2",),
        "",
        "rejection",
        "srt/speculative/dflash_worker_v2.py: _selector_sampling_accept",
    ),
    ServerRule(
        SGLANG,
        ("lilicorr",),
        "",
        "greedy_draft",
        "srt/speculative/lilicorr_utils.py: resolve_sampling_enabled; srt/environ.py: SGLANG_ENABLE_LILICORR_SAMPLING",
    ),
    ServerRule(
        SGLANG,
        ("lilicorr",),
        "SGLANG_ENABLE_LILICORR_SAMPLING=1",
        "rejection",
        "srt/speculative/lilicorr_utils.py: resolve_sampling_enabled",
        own_switch=True,
    ),
    ServerRule(
        SGLANG,
        ("dspark",),
        "",
        "rejection",
        "srt/speculative/dspark_components/dspark_verify.py: accept_draft_tokens",
    ),
    ServerRule(
        SGLANG,
        ("dspark",),
        "SGLANG_DSPARK_USE_GREEDY_DRAFT=1",
        "greedy_draft",
        "srt/environ.py: SGLANG_DSPARK_USE_GREEDY_DRAFT",
    ),
    ServerRule(
        SGLANG,
        ("dflash2", "lilicorr", "dspark"),
        "--speculative-use-block-verification",
        "block",
        "srt/speculative/dflash_worker_v2.py: _block_verification",
        "CUDA and ROCm; drafts that draw only",
    ),
)


def list_server_rules(strategy: str) -> Iterator[ServerRule]:
    """Yield the rows for drafts of a strategy; none for one that no known server loads."""
    return (row for row in SERVER_RULES if strategy in row.strategies)


def list_usual_rules(strategy: str) -> tuple[AcceptanceRule, ...]:
    """Return the rules that servers have for drafts of a strategy unasked, each once, vLLM's first.

    For a strategy that no known server loads it is `greedy_draft`, the default of both servers.
    """
    found: dict[AcceptanceRule, None] = {row.rule: None for row in list_server_rules(strategy) if row.usual}
    return tuple(found) if found else ("greedy_draft",)


def describe_servers(strategy: str, rule: AcceptanceRule | None) -> str:
    """Return the servers that accept so: those that do unasked; without one, those that can be told to.

    Args:
        rule: None is greedy decoding, of which nothing is said.
    """
    if rule is None:
        return ""
    rows = [row for row in list_server_rules(strategy) if row.rule == rule]
    unasked = [row for row in rows if not row.flags]
    return ", ".join(row.describe() for row in unasked or rows) or UNKNOWN_SERVERS
