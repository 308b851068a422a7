"""What heads do by their weights alone (https://transformer-circuits.pub/2021/framework). Functions of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from transformer_std.analysis.labels import Label, Sweep
from transformer_std.analysis.readout import named_tokens
from transformer_std.components.norms import RMSNorm
from transformer_std.hooks.hosts import Host
from transformer_std.modules import LayerNorm
from transformer_std.transformer import Transformer
from transformer_std.weights import computes_as, own_weight

OF_KV_HEADS = ("W_K", "W_V", "b_K", "b_V")
OF_ATTENTION = ("W_Q", *OF_KV_HEADS, "W_O", "b_Q", "b_O")
KINDS = ("Q", "K", "V")


class Factored:
    """A matrix of low rank as the product `left @ right`, which is not made until it is asked for.

        ov = model.OV(5, 1)
        ov.T, ov @ model.OV(4, 7), directions @ ov, ov.norm(), ov.svd(), ov.eigenvalues(), ov.dense()

    Attributes:
        left: [*axes rows rank].
        right: [*axes rank columns].
    """

    def __init__(self, left: Float[Tensor, "*left rows rank"], right: Float[Tensor, "*right rank columns"]):
        if left.shape[-1] != right.shape[-2]:
            raise ValueError(f"a left factor {list(left.shape)} and a right one {list(right.shape)} have no product")
        self.left, self.right = left, right

    def __repr__(self) -> str:
        return f"Factored({list(self.shape)}, rank {self.rank})"

    @property
    def shape(self) -> torch.Size:
        axes = torch.broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2])
        return torch.Size((*axes, self.left.shape[-2], self.right.shape[-1]))

    @property
    def rank(self) -> int:
        """The most that it can be."""
        return self.left.shape[-1]

    @property
    def T(self) -> Factored:
        return Factored(self.right.mT, self.left.mT)

    def __matmul__(self, other: Tensor | Factored) -> Tensor | Factored:
        """By a matrix or another `Factored`, which is one of the smaller rank; by a vector a vector."""
        if isinstance(other, Factored):
            between = self.right @ other.left
            if self.rank <= other.rank:
                return Factored(self.left, between @ other.right)
            return Factored(self.left @ between, other.right)
        if other.ndim == 1:
            return (self.left @ (self.right @ other[:, None])).squeeze(-1)
        return Factored(self.left, self.right @ other)

    def __rmatmul__(self, other: Tensor) -> Tensor | Factored:
        if other.ndim == 1:
            return ((other[None] @ self.left) @ self.right).squeeze(-2)
        return Factored(other @ self.left, self.right)

    def __mul__(self, number: int | float) -> Factored:
        return Factored(self.left * number, self.right)

    __rmul__ = __mul__

    def dense(self) -> Float[Tensor, "*axes rows columns"]:
        return self.left @ self.right

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """`U`, `S` and `Vh`, [*axes rows rank], [*axes rank] and [*axes rank columns], by way of the factors alone; in
        float32 at least."""
        left, left_core = torch.linalg.qr(_wide(self.left))
        right, right_core = torch.linalg.qr(_wide(self.right).mT)
        u, s, vh = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
        return left @ u, s, vh @ right.mT

    def norm(self) -> Float[Tensor, "*axes"]:
        """The Frobenius norm: the root of the sum of its squares."""
        return torch.linalg.matrix_norm(_core(self.left) @ _core(self.right.mT).mT)

    def eigenvalues(self) -> Tensor:
        """Those that may not be zero, [*axes rank], complex; of a square matrix."""
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"a matrix {list(self.shape[-2:])} is not square and has no eigenvalues")
        return torch.linalg.eigvals(_wide(self.right) @ _wide(self.left))


class Singular(NamedTuple):
    """One of the pairs of directions that a head's OV circuit maps to one another.

    Attributes:
        value: the singular value: by how much the one is scaled to become the other.
        reads: the tokens whose embedding has most of the direction that is read: name, or without a tokenizer the id,
            -> dot product.
        writes: the tokens whose logit rises most by the direction that is written: name -> what it adds.
    """

    value: float
    reads: dict[str | int, float]
    writes: dict[str | int, float]


def stacked(model: Transformer, name: str, *, query_heads: bool = False) -> Tensor:
    """A weight of every block, stacked: `W_Q`, `W_K`, `W_V`, `W_O`, `W_in`, `W_gate`, `W_out`, or the `b_` of each.

        model.stacked("W_K")                    # [layers kv_heads hidden_size head_dim], which is model.W_K
        model.stacked("W_K", query_heads=True)  # [layers num_heads hidden_size head_dim]

    Args:
        query_heads: a key/value head's entry once for each query head of its group.

    Raises:
        ValueError: blocks whose weights differ in shape, or `query_heads` of a weight that is not of key/value heads.
        UnreadableWeight: a weight that is not there to be read.
    """
    if query_heads and name not in OF_KV_HEADS:
        raise ValueError(f"{name} is not of key/value heads: only {', '.join(OF_KV_HEADS)} can be repeated")
    part = "self_attn" if name in OF_ATTENTION else "mlp"
    hosts = [getattr(layer, part) for layer in model.layers]
    found = [getattr(host, name) for host in hosts]
    if query_heads:
        found = [host.by_query_head(each) for host, each in zip(hosts, found, strict=True)]
    shapes = [tuple(each.shape) for each in found]
    if other := next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None):
        raise ValueError(
            f"{name} is {list(shapes[0])} in block 0 and {list(shapes[other])} in block {other}, which do not stack: "
            f"read model.layers[i].{part}.{name}"
        )
    return torch.stack(found)


def weight_of_blocks(name: str) -> property:
    return property(lambda model: stacked(model, name), doc=f"`{name}` of every block, as `stacked` gives it.")


@torch.no_grad()
def OV(model: Transformer, layer: int, head: int, *, folded: bool = False, biases: bool = False) -> Factored:
    """What query head `head` of block `layer` writes where it attends: `x @ OV` of what the values are projections of,
    [hidden_size hidden_size]. Of grouped heads its own group's values.

    Args:
        folded: with the gain and the centring of the norm that is read through, and of one behind the attention: of
            the stream divided by that norm's scale.
        biases: with a row more, what is written of the biases: `(x, 1) @ OV`.

    Raises:
        ValueError: a layer or head that there is none of.
        UnreadableWeight: a weight that is not there to be read, as of a latent's keys and values.
    """
    attention, group = _attention(model, layer, head)
    value = _reading(model, layer, attention.W_V[group], attention.b_V[group], folded, biases)
    out = attention.W_O[head]
    if folded and attention.post_norm is not None:
        gain = own_weight(attention, "post_norm", "weight", RMSNorm, LayerNorm)
        out = attention.post_norm.centred(out) * attention.post_norm.gain(gain).to(out)
    return Factored(value, out)


@torch.no_grad()
def QK(model: Transformer, layer: int, head: int, *, folded: bool = False, biases: bool = False) -> Factored:
    """How query head `head` of block `layer` scores: `x_query @ QK @ x_key` of what the queries and keys are
    projections of, before it is scaled; [hidden_size hidden_size]. Of grouped heads its own group's keys.

    What there is between is left out: the rotary, which turns it by the distance, and norms of queries and keys.

    Args:
        folded: with the gain and the centring of the norm that is read through: of the stream divided by its scale.
        biases: with a row and a column more, of the queries' and the keys' biases: `(x_query, 1) @ QK @ (x_key, 1)`.

    Raises:
        ValueError, UnreadableWeight: as `OV`.
    """
    attention, group = _attention(model, layer, head)
    query = _reading(model, layer, attention.W_Q[head], attention.b_Q[head], folded, biases)
    key = _reading(model, layer, attention.W_K[group], attention.b_K[group], folded, biases)
    return Factored(query, key.mT)


@torch.no_grad()
def composition_scores(model: Transformer, kind: str, *, folded: bool = False) -> Sweep:
    """How much of what each head writes is read by the queries ("Q"), keys ("K") or values ("V") of each later head:
    |first second| / (|first| |second|), in Frobenius norms, of the first's `OV` and the second's `QK`, its transpose,
    or `OV`. Zero where the second is of no later block.

    Returns:
        [layer num_heads to_layer to_head].

    Raises:
        ValueError: another kind.
        UnreadableWeight: as `OV`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; give 'Q', 'K' or 'V'")
    count, heads = model.num_layers, model.num_heads
    values = [_all(model, "OV", layer, folded) for layer in range(count)]
    scores = values[0].left.new_zeros(count, heads, count, heads, dtype=torch.float32)
    for to in range(1, count):
        second = values[to] if kind == "V" else _all(model, "QK", to, folded)
        second = second.T if kind == "K" else second
        for layer in range(to):
            first = values[layer]
            between = einsum(_wide(first.right), _wide(second.left), "a rank hidden, b hidden other -> a b rank other")
            cores = _core(first.left)[:, None] @ between.to(scores) @ _core(second.right.mT).mT
            scores[layer, :, to] = torch.linalg.matrix_norm(cores) / (first.norm()[:, None] * second.norm())
    labels: list[tuple[str, Sequence[Label]]] = [
        ("layer", range(count)), ("num_heads", range(heads)), ("to_layer", range(count)), ("to_head", range(heads)),
    ]  # fmt: skip
    return Sweep.of(scores, labels, f"{kind}-composition")


@torch.no_grad()
def singular_tokens(model: Transformer, layer: int, head: int, *, count: int = 3, k: int = 5) -> list[Singular]:
    """The `count` largest singular pairs of a head's folded `OV` as tokens: the direction that it reads by the
    embedding, the one it writes by the final norm's gain and the unembedding. A pair's signs may both be turned: they
    are such that the largest change of a logit is a rise.

    Raises:
        ValueError, UnreadableWeight: as `OV`.
    """
    u, s, vh = OV(model, layer, head, folded=True).svd()
    logits = vh[:count] @ _gained(model, "norm", model.W_U.mT.float()).mT
    largest = logits.gather(-1, logits.abs().argmax(-1, keepdim=True)).sign()
    reads = (u.mT[:count] @ model.W_E.float().mT) * largest

    def best(scores: Tensor) -> dict[str | int, float]:
        values, ids = scores.topk(min(k, len(scores)))
        return dict(
            named_tokens(model, values, ids) if model.has_tokenizer else zip(ids.tolist(), values.tolist(), strict=True)
        )

    pairs = zip(s[:count].tolist(), reads, logits * largest, strict=True)
    return [Singular(value, best(read), best(written)) for value, read, written in pairs]


def _attention(model: Transformer, layer: int, head: int) -> tuple[Host, int]:
    """A block's attention, and the key/value head of its query head."""
    if not 0 <= layer < model.num_layers:
        raise ValueError(f"layer {layer} is out of range: there are 0 to {model.num_layers - 1}")
    attention = model.layers[layer].self_attn
    count = attention.cfg.num_heads
    if not 0 <= head < count:
        raise ValueError(f"head {head} is out of range: block {layer} has heads 0 to {count - 1}")
    return attention, head * attention.cfg.num_kv_heads // count


def _reading(
    model: Transformer,
    layer: int,
    weight: Float[Tensor, "hidden_size head_dim"],
    bias: Float[Tensor, " head_dim"],
    folded: bool,
    biases: bool,
) -> Float[Tensor, "rows head_dim"]:
    """A projection of what the attention reads; with `folded`, of the stream that its norm divides."""
    block = model.layers[layer]
    norm, _ = block.readers["attention"]
    if folded and norm is not None:
        if not computes_as(getattr(block, norm), RMSNorm):
            bias = bias + own_weight(block, norm, "bias", LayerNorm) @ weight
        weight = _gained(block, norm, weight.mT).mT
    return torch.cat((weight, bias[None])) if biases else weight


def _gained(host: Host, name: str, rows: Float[Tensor, "*axes hidden_size"]) -> Float[Tensor, "*axes hidden_size"]:
    """Rows that act on what the norm `name` gives, as they act on what it divides."""
    norm, gain = getattr(host, name), own_weight(host, name, "weight", RMSNorm, LayerNorm)
    return norm.centred(rows * norm.gain(gain).to(rows))


def _all(model: Transformer, name: str, layer: int, folded: bool) -> Factored:
    """`OV` or `QK` of every head of a block."""
    of = {"OV": OV, "QK": QK}[name]
    each = [of(model, layer, head, folded=folded) for head in range(model.num_heads)]
    return Factored(torch.stack([one.left for one in each]), torch.stack([one.right for one in each]))


def _core(x: Float[Tensor, "*axes rows rank"]) -> Float[Tensor, "*axes small rank"]:
    """A small matrix whose columns have the lengths and the angles of those of `x`."""
    return torch.linalg.qr(_wide(x), mode="r").R


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
