"""Building blocks of Llama-like drafts: linear layers, norm, MLP, rotary positions, a head over a reduced vocabulary.

And torch.compile for functions that are called with many kinds of arguments.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.logit_losses import find_argmax
from draftworks.drafts.objectives import KnownArgmaxes, Teacher
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


_STATIC_ROPE = ("linear", "llama3", "yarn")
"""Rope types whose frequencies do not depend on the sequence length; `default` is computed here."""


Layer = TypeVar("Layer", bound=nn.Module)


def uninitialized_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """Return a layer without initialised weights on the default device; `torch.device("meta")` gives sizes alone."""
    return allocate(nn.Linear(inputs, outputs, bias, device="meta"))


class UninitializedEmbedding(nn.Embedding):
    """An embedding without initialised weights on the default device; torch would import its compiler to draw on meta."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


def allocate(layer: Layer) -> Layer:
    """Give a layer that was made on meta uninitialised parameters on the default device; return it.

    As `nn.Module.to_empty` and `nn.utils.skip_init`, but for their operations on meta tensors torch imports sympy.
    """
    for name, parameter in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
    return layer


def seeded_linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer without bias, uniform in ±1/sqrt(inputs), drawn from `generator` alone."""
    layer = uninitialized_linear(inputs, outputs, bias=False)
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    return layer


class RmsNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension; the mean square is taken in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNormFunction.apply(x, self.weight, self.eps)


class _RmsNormFunction(torch.autograd.Function):
    """RMS norm with half the memory passes of composed operators on a CPU; saves the input and one number per position.

    The result is detached, as is that of `_SwigluFunction`: with torch 2.11, compiled blocks pass no gradient through the
    result of an operator in place.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype).mul_(weight).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        grad, gain = grad.to(inverse.dtype), weight.to(inverse.dtype)
        unit = x.to(inverse.dtype) * inverse
        product = grad * unit
        d_weight = product.flatten(0, -2).sum(0)
        along = (product @ gain).div_(-x.shape[-1]).unsqueeze(-1)
        d_x = (grad * gain).addcmul_(unit, along).mul_(inverse)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


def fuse_taps(features: Tensor, norms: nn.ModuleList, fc: nn.Linear) -> Tensor:
    """Fuse taps side by side, ascending, (…, taps · H), to one state (…, H); `norms`, if any, norm each tap first."""
    features = features.to(fc.weight.dtype)
    if norms:
        taps = features.chunk(len(norms), dim=-1)
        features = torch.cat([norm(tap) for norm, tap in zip(norms, taps, strict=True)], dim=-1)  # (…, taps · H)
    return fc(features)


class GatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, size: int, intermediate: int, generator: torch.Generator) -> None:
        super().__init__()
        self.gate_proj = seeded_linear(size, intermediate, generator)
        self.up_proj = seeded_linear(size, intermediate, generator)
        self.down_proj = seeded_linear(intermediate, size, generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_SwigluFunction.apply(self.gate_proj(x), self.up_proj(x)))


class _SwigluFunction(torch.autograd.Function):
    """`silu(gate) * up`; silu(gate) is recomputed in the backward pass instead of kept for every step of an unroll."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, F.silu(gate).mul_(grad)


class Rotation(NamedTuple):
    """Cosines and sines of consecutive positions, (S, head_dim) each."""

    cos: Tensor
    sin: Tensor

    def window(self, start: int, length: int) -> Rotation:
        return Rotation(self.cos[start : start + length], self.sin[start : start + length])

    def at(self, positions: Tensor) -> Rotation:
        """Return the rotation at any positions (…, S), in their order."""
        return Rotation(self.cos[positions], self.sin[positions])

    def apply(self, x: Tensor) -> Tensor:
        """Rotate heads (B, heads, S, head_dim); halves are paired, as in transformers' Llama."""
        return _RotateFunction.apply(x, self.cos, self.sin)


class _RotateFunction(torch.autograd.Function):
    """`x·cos + rotate_half(x)·sin`; the gradient is the inverse rotation, so x is not saved."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned


class Rotary(nn.Module):
    """Rotary position embedding with the target's parameters."""

    inv_freq: Tensor

    def __init__(self, target: TargetParts) -> None:
        super().__init__()
        frequencies = rope_frequencies(target)
        self.register_buffer("inv_freq", frequencies.inverse, persistent=False)
        self.scaling = frequencies.scaling

    def forward(self, length: int, dtype: torch.dtype) -> Rotation:
        """Return the rotation of positions 0 … length-1 in `dtype`; angles are computed in the buffer's precision."""
        positions = torch.arange(length, device=self.inv_freq.device).to(self.inv_freq.dtype)
        half = torch.outer(positions, self.inv_freq)
        angles = torch.cat((half, half), dim=-1)  # (length, head_dim)
        return Rotation((angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype))


class RopeFrequencies(NamedTuple):
    """Inverse frequencies (head_dim/2,) float32, and the factor on cosines and sines (1 except for yarn)."""

    inverse: Tensor
    scaling: float


def rope_frequencies(target: TargetParts) -> RopeFrequencies:
    """Return the frequencies of the target's rope parameters.

    Raises:
        ConfigError: a rope type that depends on the sequence length, or one that rotates only part of a head.
    """
    rope: Mapping[str, Any] = target.rope
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", *_STATIC_ROPE):
        raise ConfigError(
            f"rope parameters {dict(rope)} are not supported: expected rope_type default, "
            f"{', '.join(_STATIC_ROPE)} over the whole head"
        )
    if kind == "default":
        exponents = torch.arange(0, target.head_dim, 2, dtype=torch.float32) / target.head_dim
        return RopeFrequencies(1.0 / float(rope["rope_theta"]) ** exponents, 1.0)
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=1,  # ignored because head_dim is given; 1 divides every hidden_size
        head_dim=target.head_dim,
        max_position_embeddings=target.max_positions,
        rope_parameters=dict(rope),
    )
    with torch.device("cpu"):  # what transformers makes without a device would be on the default one, which may be meta
        inverse, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return RopeFrequencies(inverse.float().to(torch.get_default_device()), float(scaling))


LOGITS_PER_CHUNK = {"cpu": 2**22, "cuda": 2**28}
"""Logits held at a time by `argmax_of_head`, by device type; at least one position. A GPU wants large products."""


def argmax_of_head(head: Tensor, states: Tensor) -> Tensor:
    """Chunked argmax of a head's logits: states (N, H) to token ids (N,) int64.

    The head (V, H) runs in its own dtype, as on a server. At most LOGITS_PER_CHUNK logits exist at a time.
    """
    positions = max(1, LOGITS_PER_CHUNK.get(states.device.type, LOGITS_PER_CHUNK["cuda"]) // head.shape[0])
    return torch.cat([find_argmax(F.linear(part.to(head.dtype), head)) for part in states.split(positions)])


class ReducedVocabularyDraft(nn.Module):
    """A draft whose head predicts V_d target tokens.

    Attributes:
        lm_head: the head.
        d2t: (V_d,) int64; the target id of a draft id is draft id + d2t[draft id].
        t2d: (V,) bool, which target ids the head predicts.
    """

    lm_head: nn.Linear
    d2t: Tensor
    t2d: Tensor

    def _init_head(self, draft_ids: Tensor, target: TargetParts) -> None:
        """Create the head, initialised with the target's rows, and the tables. `draft_ids` (V_d,) int64 ascending."""
        self.lm_head = uninitialized_linear(target.hidden_size, draft_ids.numel(), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[draft_ids])
        in_draft = torch.zeros(target.vocab_size, dtype=torch.bool, device=draft_ids.device)
        in_draft[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(draft_ids.numel(), device=draft_ids.device))
        self.register_buffer("t2d", in_draft)

    @property
    def draft_ids(self) -> Tensor:
        """Target ids that `lm_head` predicts, (V_d,) int64."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def teacher(self, last: Tensor, target_head: Tensor, argmaxes: Tensor | None = None) -> Teacher:
        """Return the teacher of the target's last hidden states (B, S, H) and head (V, H).

        Args:
            argmaxes: (B·S,) int64, the target's, where they are known.
        """
        draft_ids, draft_index = self.draft_ids, torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)
        known = None if argmaxes is None else KnownArgmaxes(argmaxes, target_head[draft_ids])
        return Teacher(last.flatten(0, 1), target_head, draft_ids, draft_index, known)

    def to_target_vocab(self, probabilities: Tensor) -> Tensor:
        """(…, V_d) to (…, V); tokens outside the draft's vocabulary get probability 0."""
        whole = probabilities.new_zeros(*probabilities.shape[:-1], self.t2d.numel())
        whole[..., self.draft_ids] = probabilities
        return whole


def require_draft_ids(strategy: str, vocab: VocabMapping | None, draft_vocab_size: int, target: TargetParts) -> Tensor:
    """Return the target ids of the mapping's tokens, (V_d,) int64, ascending.

    Raises:
        ConfigError: there is no mapping, or it is for another target or size.
    """
    if vocab is None:
        raise ConfigError(f"{strategy} predicts over a reduced vocabulary: expected a vocabulary mapping, found none")
    if len(vocab.t2d) != target.vocab_size:
        raise ConfigError(
            f"vocabulary mapping is for {len(vocab.t2d)} target tokens, the target has {target.vocab_size}"
        )
    if len(vocab.d2t) != draft_vocab_size:
        raise ConfigError(
            f"{strategy}: draft_vocab_size is {draft_vocab_size}, the vocabulary mapping holds {len(vocab.d2t)} tokens: "
            "make the mapping again for this size, or set the option to the mapping's"
        )
    return torch.from_numpy(vocab.target_ids)


Function = TypeVar("Function", bound=Callable[..., Any])

KINDS = 64
"""Kinds of arguments that a function is compiled for. One batch row or several, one tile or several, a window or none,
two strategies in one process: they multiply.
"""


def compile_for_many_kinds(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, **options)` with room for KINDS kinds of arguments.

    torch's own limit is eight for all functions that share code. Beyond it, it runs them uncompiled, with no more than
    a line in the log: slowly, and flex attention then holds every score.
    """
    fast = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=KINDS):
            return fast(*args, **kwargs)

    return call


def without_compile(function: Function) -> Function:
    """Return a function at which graphs break: `torch.compiler.disable`, applied when something may be compiled.

    Applied at once it would import torch._dynamo, with sympy and DTensor: two seconds of each program that compiles
    nothing.
    """
    made: list[Function] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not made:
            made.append(cast(Function, torch.compiler.disable(function)))
        return made[0](*args, **kwargs)

    return cast(Function, call)
