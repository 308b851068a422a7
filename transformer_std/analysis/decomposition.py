"""What the residual stream is the sum of, and what each part says to the logits.

The names are those of TransformerLens' ActivationCache; here the parts sum to the whole within rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from transformer_std.activation_cache import CachedValues
from transformer_std.components.norms import RMSNorm
from transformer_std.hooks.hosts import Host
from transformer_std.hooks.names import UnknownName
from transformer_std.modules import LayerNorm
from transformer_std.transformer import Transformer
from transformer_std.weights import computes_as, linear_map, own_weight

Stack = Float[Tensor, "component *axes hidden_size"]
Labelled = Any  # a Stack, or with return_labels a pair of it and the components' names


class ActivationCache(CachedValues):
    """What `run_with_cache` saw. Keys are full names; `cache["attention_queries", 3]` is block 3's.

    Gradients, where they were asked for, are under the value's name with `_grad` behind it. TransformerLens' names are
    understood, and answered in its order of axes. What takes the values apart raises `UnknownName` where the cache does
    not hold those it needs.
    """

    def decompose_resid(
        self, layer: int | None = None, *, mlp_input: bool = False, apply_ln: bool = False, return_labels: bool = False
    ) -> Labelled:
        """The contributions that sum to the stream entering block `layer` (None or -1: leaving the last), or with
        `mlp_input` to that block's `layer_mid`: the embedding, that of the positions where they are learned, then every
        block's attention and MLP.

        On a sandwich block the contributions are the post-norms' outputs. `apply_ln` sends each through the norm that
        reads the sum, with its frozen scale.

        Returns:
            [component batch seq hidden_size], and with `return_labels` the labels: `embed`, `0_attn_out`, ...
        """
        at = self._blocks_before(layer)
        if self.model.config.positions is None:
            parts, labels = [self["layer_input", 0]], ["embed"]
        else:
            parts, labels = [self["token_embeddings"], self["position_embeddings"]], ["embed", "pos_embed"]
        for i in range(at):
            parts += [self["attention_output", i], self["mlp_output", i]]
            labels += [f"{i}_attn_out", f"{i}_mlp_out"]
        if mlp_input:
            self.model.names.at("layer_mid", at)  # where there is none, its reason
            parts.append(self["attention_output", at])
            labels.append(f"{at}_attn_out")
        return self._answer(torch.stack(parts), labels, at, mlp_input, apply_ln, return_labels)

    def accumulated_resid(
        self, layer: int | None = None, *, incl_mid: bool = False, apply_ln: bool = False, return_labels: bool = False
    ) -> Labelled:
        """The stream entering each block up to `layer` (None or -1: and leaving the last), with `incl_mid` between its
        sublayers too, [component batch seq hidden_size]. `apply_ln`: through the norm that reads the last of them,
        with its frozen scale."""
        at = self._blocks_before(layer)
        parts, labels = [], []
        for i in range(at):
            parts.append(self["layer_input", i])
            labels.append(f"{i}_pre")
            if incl_mid:
                parts.append(self["layer_mid", i])
                labels.append(f"{i}_mid")
        parts.append(self._stream(at, False))
        labels.append("final_post" if at == self.model.num_layers else f"{at}_pre")
        return self._answer(torch.stack(parts), labels, at, False, apply_ln, return_labels)

    def stack_head_results(
        self,
        layer: int | None = None,
        *,
        post_norm: bool = True,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        return_labels: bool = False,
    ) -> Labelled:
        """Each head's contribution in the blocks before `layer` (None or -1: in all), [component batch seq
        hidden_size].

        On a sandwich block it goes through the post-norm with its frozen scale, so that the heads and the projection's
        bias sum to `attention_output`; without `post_norm` it is what enters that norm. `incl_remainder` adds what the
        heads leave of the stream.
        """
        at = self._blocks_before(layer)
        parts, labels = [], []
        for i in range(at):
            heads = rearrange(self["attention_result", i], "... head hidden -> head ... hidden")
            attention = self.model.layers[i].self_attn
            if attention.post_norm is not None and post_norm:
                heads = frozen(attention, "post_norm", heads, self["attention_unnormed_output", i])
            parts.append(heads)
            labels += [f"L{i}H{head}" for head in range(len(heads))]
        stack = torch.cat(parts) if parts else self["layer_input", 0].new_zeros(0, *self["layer_input", 0].shape)
        if incl_remainder:
            stack = torch.cat((stack, (self._stream(at, False) - stack.sum(0))[None]))
            labels.append("remainder")
        return self._answer(stack, labels, at, False, apply_ln, return_labels)

    def apply_ln_to_stack(self, stack: Stack, layer: int | None = None, *, mlp_input: bool = False) -> Stack:
        """Each part of a stream through the norm that reads it, with the scale, and for a LayerNorm the centring, of
        the whole: block `layer`'s first norm, with `mlp_input` its second, with None or -1 the final one. Without the
        norm's bias, which belongs to no part; where a sublayer reads the stream itself, the parts as they are."""
        at = self._blocks_before(layer)
        if at == self.model.num_layers:
            return frozen(self.model, "norm", stack, self._stream(at, False))
        block = self.model.layers[at]
        norm, stream = block.readers["mlp" if mlp_input else "attention"]
        return stack if norm is None else frozen(block, norm, stack, self[stream, at])

    def logit_attrs(self, stack: Stack, tokens: Any, incorrect_tokens: Any = None) -> Float[Tensor, "component ..."]:
        """What each part of the last stream adds to the logit of `tokens`, less that of `incorrect_tokens`: through the
        final norm with its frozen scale, then the head.

        `tokens` is a text of one token, an id, a list of either, one a row, or ids [batch] or [batch seq] (of a cache
        without one of these axes, the other). Over a stack that sums to the stream the attributions, and
        `model.bias_logits` of the token, sum to the logit; of a model that caps its logits, to `lm_head_output`.
        """
        normed = self.apply_ln_to_stack(stack)
        with in_graph_of(normed):
            direction = self._direction(tokens)
            if incorrect_tokens is not None:
                direction = direction - self._direction(incorrect_tokens)
            return (normed * direction.to(normed.device)).sum(-1)

    def logit_lens(self, layer: int | None = None) -> Float[Tensor, "component *axes vocab_size"]:
        """The logits that the final norm, applied afresh, and the head make of the stream entering each block, and of
        the one leaving the last."""
        streams = self.accumulated_resid(layer)
        with in_graph_of(streams):
            return self.model.project_on_vocab(streams)

    def logit_lens_frozen(self, layer: int | None = None) -> Float[Tensor, "component *axes vocab_size"]:
        """As `logit_lens`, but with the final norm's scale as it was on the whole stream, and before any cap:
        differences between the entries are then what each block adds to `lm_head_output`."""
        normed = self.apply_ln_to_stack(self.accumulated_resid(layer))
        with in_graph_of(normed):
            return self.model.lm_head(normed if (bias := norm_bias(self.model)) is None else normed + bias)

    def expert_counts(self, layer: int) -> Int[Tensor, " num_experts"]:
        """How many slots of real tokens block `layer` sent to each expert."""
        indices = self._real(self["expert_indices", layer])
        return torch.bincount(indices.flatten(), minlength=self.model.layers[layer].mlp.num_experts)

    def routing_entropy(self, layer: int) -> Float[Tensor, " token"]:
        """How undecided block `layer`'s router is at each real token, in nats: the entropy of its scores over all
        experts, as shares of their sum; of the softmax of its logits where it does not score them all."""
        if self.model.support(layer)["router_scores"] is not None:
            shares = self._real(self["router_logits", layer]).float().softmax(-1)
        else:
            shares = self._real(self["router_scores", layer]).float()
        return torch.special.entr(shares / shares.sum(-1, keepdim=True)).sum(-1)

    def _real(self, value: Float[Tensor, "*batch_seq each"] | Int[Tensor, "*batch_seq each"]) -> Tensor:
        """`value` at the real tokens, [token each]; a cached pass has the mask of what was read before it too."""
        if "attention_mask" not in self:
            raise UnknownName(
                "only real tokens count, and attention_mask, which says which are, is not in this cache: name it in "
                "names_filter too"
            )
        mask = self["attention_mask"].bool()
        return value[mask if "seq" in self._gone else mask[..., -value.shape[mask.ndim - 1] :]]

    def _blocks_before(self, layer: int | None) -> int:
        """How many blocks made the stream that enters block `layer`: all, with None, -1 or their number."""
        count = self.model.num_layers
        if layer is None or layer == -1:
            return count
        if not 0 <= layer <= count:
            raise UnknownName(
                f"layer {layer} is out of range: give 0 to {count - 1}, for what enters that block, or None, -1 or "
                f"{count}, for what leaves the last"
            )
        return layer

    def _stream(self, at: int, mlp_input: bool) -> Tensor:
        if mlp_input:
            return self["layer_mid", at]
        return self["layer_output", at - 1] if at == self.model.num_layers else self["layer_input", at]

    def _direction(self, tokens: Any) -> Tensor:
        """The head's row of each token: [hidden_size], [batch 1 hidden_size] or [batch seq hidden_size]."""
        if isinstance(tokens, str):
            tokens = self.model.to_single_token(tokens)
        elif isinstance(tokens, (list, tuple)):  # one a row
            ids = [self.model.to_single_token(each) if isinstance(each, str) else each for each in tokens]
            tokens = torch.tensor(ids)
        rows = rearrange(self.model.W_U, "hidden vocab -> vocab hidden")[tokens]
        has_both = not self._gone & {"batch", "seq"}
        return rows[:, None] if rows.ndim == 2 and has_both else rows

    def _answer(
        self,
        stack: Tensor,
        labels: Sequence[str],
        at: int,
        mlp_input: bool,
        apply_ln: bool,
        return_labels: bool,
    ) -> Labelled:
        stack = self.apply_ln_to_stack(stack, at, mlp_input=mlp_input) if apply_ln else stack
        return (stack, list(labels)) if return_labels else stack


def in_graph_of(*values: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autograd follows where one of `values` is in its graph: what a model's weights alone would bring there is a
    number to look at."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and any(each.requires_grad for each in values))


def frozen(host: Host, name: str, stack: Stack, whole: Float[Tensor, "*axes hidden_size"]) -> Stack:
    """The norm `name` of `host` as the linear map that it was on `whole`, without its bias."""
    weight, norm = own_weight(host, name, "weight", RMSNorm, LayerNorm), getattr(host, name)
    with in_graph_of(stack, whole):
        return norm.frozen(stack.float(), whole.float(), weight).to(stack.dtype)


def norm_bias(model: Transformer) -> Float[Tensor, " hidden_size"] | None:
    """The final norm's bias; an RMS norm has none."""
    return None if computes_as(model.norm, RMSNorm) else own_weight(model, "norm", "bias", LayerNorm)


@torch.no_grad()
def bias_logits(model: Transformer) -> Float[Tensor, " vocab_size"]:
    """The constant that the final norm's bias and the head's add to every logit, whatever the input."""
    bias = norm_bias(model)
    weight, head_bias = linear_map(model, "lm_head", model.hidden_size)
    return head_bias if bias is None else head_bias + einsum(weight, bias, "vocab hidden, hidden -> vocab")
