"""Attention of chains: back ends agree, groups never reach into another document, and what is kept grows with rows alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftworks.drafts.attention import GROUP_TOKENS, DraftAttention, KeyValue
from draftworks.drafts.documents import Documents
from draftworks.strategies.peagle.chains import Chains

HEADS, KV_HEADS, WIDTH = 4, 2, 6


def chains_of(lengths: tuple[int, ...], batch: int = 1, depths: int = 5, share: float = 0.6) -> Chains:
    """Chains at some rows, of random lengths."""
    generator = torch.Generator().manual_seed(sum(lengths))
    alive = torch.rand(depths - 1, batch, sum(lengths), generator=generator) < share
    kept = torch.cat([torch.ones_like(alive[:1]), alive.cumprod(0).bool()])
    return Chains.of(kept, Documents.from_lengths(lengths))


def inputs_of(chains: Chains) -> list[Tensor]:
    """Query, context key, context value, own key, own value."""
    generator = torch.Generator().manual_seed(0)
    rows, context = chains.count, chains.batch * chains.length
    shapes = [(HEADS, rows), (KV_HEADS, context), (KV_HEADS, context), (KV_HEADS, rows), (KV_HEADS, rows)]
    return [
        torch.randn(1, heads, count, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, count in shapes
    ]


def attended(chains: Chains, backend: str, inputs: list[Tensor]) -> Tensor:
    query, *others = inputs
    return DraftAttention(chains.make_seen_keys(), backend)(query, KeyValue(*others[:2]), KeyValue(*others[2:]))


@pytest.mark.parametrize(
    ("lengths", "batch"), [((7,), 1), ((90,), 2), ((3, 60, 1, 25), 1), ((200,), 1)], ids=lambda value: str(value)
)
def test_back_ends_agree_in_output_and_gradients(lengths, batch):
    chains = chains_of(lengths, batch)
    inputs = inputs_of(chains)
    results = {}
    for backend in ("eager", "sdpa"):
        output = attended(chains, backend, inputs)
        results[backend] = [output.detach(), *torch.autograd.grad(output.cos().sum(), inputs)]
    torch.testing.assert_close(results["sdpa"], results["eager"])
    with torch.no_grad():
        torch.testing.assert_close(attended(chains, "flex", [x.detach() for x in inputs]), results["eager"][0])


def test_without_a_masked_place_nothing_is_attended():
    chains = chains_of((9,), share=0.0)
    assert chains.count == 0
    for backend in ("eager", "sdpa"):
        inputs = inputs_of(chains)
        output = attended(chains, backend, inputs)
        assert output.shape == (1, HEADS, 0, WIDTH)
        gradients = torch.autograd.grad(output.sum(), inputs, materialize_grads=True)
        assert not any(gradient.any() for gradient in gradients)
    with torch.no_grad():
        assert attended(chains, "flex", inputs_of(chains)).shape == (1, HEADS, 0, WIDTH)


def test_not_even_a_product_with_zero_brings_in_another_document_or_what_comes_later():
    """An anchor's document begins at 40; NaN everywhere else that it must not look at."""
    chains = chains_of((40, 120, 40))
    inputs = inputs_of(chains)
    clean = attended(chains, "sdpa", inputs)
    in_middle = (chains.begins == 40).nonzero().squeeze(1)
    with torch.no_grad():
        for context in inputs[1:3]:
            context[:, :, :40] = context[:, :, 160:] = float("nan")
        for own in inputs[3:]:
            own[:, :, chains.begins != 40] = float("nan")
    assert torch.equal(attended(chains, "sdpa", inputs)[:, :, in_middle], clean[:, :, in_middle])


def saved_bytes(chains: Chains) -> int:
    """What is kept for the gradients."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = inputs_of(chains)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attended(chains, "sdpa", inputs)
    return sum(storages.values())


def test_what_is_kept_for_the_gradients_does_not_grow_with_rows_times_context():
    short, long = chains_of((150,)), chains_of((600,))
    assert short.count > GROUP_TOKENS["cpu"]
    rows = (long.count + long.length) / (short.count + short.length)
    assert saved_bytes(long) < 1.1 * rows * saved_bytes(short)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_a_compiled_layer_leaves_attention_to_itself(backend):
    """Otherwise the compiler would follow it into masks that are other ones in every batch, and into flex's own compilation."""
    graphs, chains = [], chains_of((30,))

    def recorded(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    inputs = [x.detach() for x in inputs_of(chains)]
    attend = DraftAttention(chains.make_seen_keys(), backend)
    layer = torch.compile(
        lambda query, *others: attend(query.cos(), KeyValue(*others[:2]), KeyValue(*others[2:])), backend=recorded
    )
    torch.testing.assert_close(layer(*inputs), attended(chains, backend, [inputs[0].cos(), *inputs[1:]]))
    assert (
        sum(node.op == "call_function" or node.op == "call_method" for graph in graphs for node in graph.graph.nodes)
        == 1
    )
