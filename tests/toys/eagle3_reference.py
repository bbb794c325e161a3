"""EAGLE-3 written down as plainly as its formulas: what the fast implementation is compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Transcribed(NamedTuple):
    """The loss, differentiable, and by step: mean loss, right proposals, and proposals."""

    loss: Tensor
    loss_weight: int
    step_losses: list[float]
    corrects: list[float]
    denoms: list[float]


def reference_states(w: dict[str, Tensor], cfg, input_ids: Tensor, aux: Tensor, embedding: Tensor, options):
    """What the head reads at every step, one softmax over S + i columns each. `w` is the draft's state dict."""
    batch, length = input_ids.shape
    if options.fc_norm:
        taps = aux.split(cfg.hidden_size, dim=-1)
        aux = torch.cat([_norm(x, w[f"fc_norm.{i}.weight"], cfg.rms_norm_eps) for i, x in enumerate(taps)], dim=-1)
    if options.norm_before_fc:
        aux = _norm(aux, w["input_norm.weight"], cfg.rms_norm_eps)
    ids, h = _shift_left(input_ids), aux @ w["fc.weight"].T
    keys, values, states = [], [], []
    causal = torch.tensor(
        [[k <= q and k > q - (options.sliding_window or length) for k in range(length)] for q in range(length)]
    )
    for step in range(options.ttt_length):
        e = _norm(embedding[ids], w["midlayer.input_layernorm.weight"], cfg.rms_norm_eps)
        normed_state = _norm(h, w["midlayer.hidden_norm.weight"], cfg.rms_norm_eps)
        h = normed_state if options.norm_before_residual else h
        x = torch.cat([e, normed_state], dim=-1)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(batch, length, -1, cfg.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        q, k = _rope(q, step, cfg), _rope(k, step, cfg)
        group = q.shape[1] // k.shape[1]
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        block = (q @ keys[0].transpose(-1, -2)).masked_fill(~causal, float("-inf"))
        columns = [block] + [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        a = torch.softmax(torch.cat(columns, -1) / cfg.head_dim**0.5, dim=-1)
        o = a[..., :length] @ values[0]
        for j in range(1, step + 1):
            o = o + a[..., length + j - 1, None] * values[j]
        h = h + o.transpose(1, 2).reshape(batch, length, -1) @ w["midlayer.self_attn.o_proj.weight"].T
        m = _norm(h, w["midlayer.post_attention_layernorm.weight"], cfg.rms_norm_eps)
        gate, up = m @ w["midlayer.mlp.gate_proj.weight"].T, m @ w["midlayer.mlp.up_proj.weight"].T
        h = h + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        normed = _norm(h, w["norm.weight"], cfg.rms_norm_eps)
        states.append(normed if options.norm_output else h)
        if options.feedback == "post_norm":
            h = normed
        ids = _shift_left(ids)
    return states


def reference_specforge(states, w, loss_mask: Tensor, last: Tensor, head: Tensor, options) -> Transcribed:
    """SpecForge's loss: teacher of the hidden state shifted left, mask not shifted, mean over all B·S positions; the LK
    losses by means over the positions where pm is on."""
    steps, length = len(states), loss_mask.shape[1]
    mask = loss_mask.to(last.dtype)
    z = torch.nn.functional.pad(last, (0, 0, 0, 1))[:, 1:] @ head.T
    t2d, d2t = w["t2d"], w["d2t"]
    tid, q = z.argmax(-1), torch.softmax(z[..., t2d], -1)
    whole = torch.exp(z[..., t2d] - torch.logsumexp(z, -1, keepdim=True))
    pm = t2d[tid].to(last.dtype) * mask
    q = torch.nn.functional.pad(q, (0, 0, 0, steps), value=1 / q.shape[-1])
    whole = torch.nn.functional.pad(whole, (0, 0, 0, steps))
    tid = torch.nn.functional.pad(tid, (0, steps))
    loss, step_losses, corrects, denoms = 0, [], [], []
    for i, state in enumerate(states):
        logits = state @ w["lm_head.weight"].T
        ploss = -(pm[..., None] * q[:, i : i + length] * torch.log_softmax(logits, -1)).sum(-1).mean()
        alpha = torch.minimum(whole[:, i : i + length], torch.softmax(logits, -1)).sum(-1)
        ploss = _specforge_objective(ploss, alpha, pm, options)
        best = logits.argmax(-1)
        corrects.append(((best + d2t[best] == tid[:, i : i + length]) * mask).sum().item())
        denoms.append(mask.sum().item())
        step_losses.append(float(ploss.detach()))
        loss = loss + options.step_decay**i * ploss
        pm, mask = _shift_left(pm), _shift_left(mask)
    return Transcribed(loss, 1, step_losses, corrects, denoms)


def _specforge_objective(ploss: Tensor, alpha: Tensor, pm: Tensor, options) -> Tensor:
    if options.objective == "ce":
        return ploss
    if options.objective == "lk_alpha":
        return -torch.where(pm > 0, alpha, 1).log().sum() / pm.sum().clamp(min=1)
    mean = (pm * alpha).sum() / pm.sum().clamp(min=1)
    share = options.kl_scale * torch.exp(-options.kl_decay * mean.detach())
    return share * ploss + (1 - share) * (1 - mean) * (pm.sum() > 0)


def reference_token_mean(states, w, loss_mask: Tensor, last: Tensor, head: Tensor, options) -> Transcribed:
    """Row by row: row t at step i predicts token t+2+i if all of t+1 … t+2+i are the assistant's."""
    steps, (batch, length) = len(states), loss_mask.shape
    draft_ids = w["t2d"].nonzero().squeeze(1).tolist()
    loss, rows_at_0 = last.new_zeros(()), 0
    corrects, denoms, sums = ([0.0] * steps for _ in range(3))
    for b in range(batch):
        for i in range(steps):
            for t in range(length):
                if t + 2 + i >= length or not loss_mask[b, t + 1 : t + 3 + i].all():
                    continue
                rows_at_0 += i == 0
                denoms[i] += 1
                z = last[b, t + 1 + i] @ head.T
                logits = states[i][b, t] @ w["lm_head.weight"].T
                label = int(z.argmax())
                corrects[i] += draft_ids[int(logits.argmax())] == label
                if label in draft_ids:
                    cost = _row_objective(z, logits, draft_ids, options)
                    sums[i] += float(cost.detach())
                    loss = loss + options.step_decay**i * cost
    means = [total / max(count, 1) for total, count in zip(sums, denoms, strict=True)]
    return Transcribed(loss, rows_at_0, means, corrects, denoms)


def _row_objective(z: Tensor, logits: Tensor, draft_ids: list[int], options) -> Tensor:
    ce = -(torch.softmax(z[draft_ids], -1) * torch.log_softmax(logits, -1)).sum()
    alpha = torch.minimum(torch.softmax(z, -1)[draft_ids], torch.softmax(logits, -1)).sum()
    if options.objective == "ce":
        return ce
    if options.objective == "lk_alpha":
        return -alpha.log()
    share = options.kl_scale * torch.exp(-options.kl_decay * alpha.detach())
    return share * ce + (1 - share) * (1 - alpha)


class Acceptance(NamedTuple):
    """Σ pm·Σ_v min(q̃, softmax z_d) and Σ pm of every step; the same without pm."""

    sums: list[float]
    denoms: list[int]
    all_sums: list[float]
    all_denoms: list[int]


def reference_acceptance(states, w, label_mask: Tensor, last: Tensor, head: Tensor) -> Acceptance:
    """Row by row: q̃ = exp(z[t2d] − logsumexp(z)), pm on where the row is supervised and the target's argmax in t2d."""
    sums, all_sums = ([0.0] * len(states) for _ in range(2))
    denoms, all_denoms = ([0] * len(states) for _ in range(2))
    for i, b, t in label_mask.nonzero().tolist():
        z = last[b, t + 1 + i] @ head.T
        q = torch.exp(z[w["t2d"]] - torch.logsumexp(z, -1))
        p = torch.softmax(states[i][b, t] @ w["lm_head.weight"].T, -1)
        accepted = float(torch.minimum(q, p).sum())
        all_sums[i] += accepted
        all_denoms[i] += 1
        if w["t2d"][z.argmax()]:
            sums[i] += accepted
            denoms[i] += 1
    return Acceptance(sums, denoms, all_sums, all_denoms)


def _shift_left(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rope(x: Tensor, offset: int, cfg) -> Tensor:
    d = cfg.head_dim
    inverse = (1.0 / float(cfg.rope["rope_theta"]) ** (torch.arange(0, d, 2, dtype=torch.float32) / d)).to(x.dtype)
    angle = torch.outer(torch.arange(x.shape[2], dtype=x.dtype) + offset, inverse)
    left, right = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)
