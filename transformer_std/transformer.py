"""The model: the tree of its modules and the forward through it."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from transformer_std.components.blocks import BLOCKS
from transformer_std.components.kernels import capped
from transformer_std.components.norms import build_norm, normed
from transformer_std.components.positions import documents, real_positions
from transformer_std.components.sharing import Pass
from transformer_std.components.tracing import can_look, kept
from transformer_std.config import TransformerConfig
from transformer_std.hooks.hook_point import HookPoint, laid_out_as
from transformer_std.hooks.hosts import Host
from transformer_std.hooks.names import Names
from transformer_std.hooks.runs import IDLE, RUN
from transformer_std.inputs import Input, check_call, checked_positions, checked_stream, fitting_mask, layer_span
from transformer_std.kv_cache import KVCache
from transformer_std.layouts import Logits, NextTokenProbs, PerToken, Residual, Size, Tokens
from transformer_std.loss import next_token_loss, real_transitions
from transformer_std.modules import Direct, Embedding, Linear
from transformer_std.printing import printout
from transformer_std.text import Text
from transformer_std.weights import embedding_rows, linear_map

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from transformer_std.components.blocks import Blocks


class Transformer(Text, Host):
    """A decoder-only transformer: the tree of its modules, and the forward through it.

    Its values can be watched, but it has no words for that: `HookedTransformer` has. Arguments as there.
    """

    host = "model"

    input_ids = HookPoint(Tokens, "The token ids the model was called with")
    attention_mask = HookPoint(Tokens, "The attention mask of the call; zeros are padding")
    input_size = HookPoint(Size, "(batch, seq) of the call; read-only", write="input_ids")
    token_embeddings = HookPoint(Residual, "The embedding's output, before any multiplier")
    position_embeddings = HookPoint(Residual, "The learned embedding of each position, added to the token's")
    final_norm_scale = HookPoint(PerToken, "What the final norm divides by", derived=True)
    final_norm_output = HookPoint(Residual, "The residual stream after the final norm, what the head reads")
    lm_head_output = HookPoint(Logits, "The head's output, before any cap")
    logits = HookPoint(Logits, "The logits the model returns")
    next_token_probs = HookPoint(
        NextTokenProbs,
        "The next-token distribution at each row's last real position; derived, read-only",
        write="logits",
    )

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attn_implementation: str = "sdpa",
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        seed: int | None = None,
    ):
        super().__init__()
        if attn_implementation not in ("sdpa", "eager"):
            raise ValueError(f"attn_implementation is {attn_implementation!r}; give 'sdpa' or 'eager'")
        self.config, self.attn_implementation, self._tokenizer = config, attn_implementation, tokenizer
        eager = attn_implementation == "eager"
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.padding_id)
        self.embed_positions = None
        if (learned := config.positions) is None:
            self.without("this model has no learned positions", "position_embeddings")
        else:
            self.embed_positions = Embedding(learned.count + learned.offset, config.hidden_size)
        self.layers: Blocks = nn.ModuleList(  # type: ignore[assignment]  # whose items are known to be blocks
            BLOCKS[each.kind](each, config.hidden_size, eager) for each in config.layers
        )
        self.norm = build_norm(config.norm, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.lm_head.weight = self.embed_tokens.weight
        # What blocks need in a pass is made once, and each is told where its own is.
        needs = [block.needs() for block in self.layers]
        self.needs = list(dict.fromkeys(need for each in needs for need in each))
        self._own_needs = [[self.needs.index(need) for need in each] for each in needs]
        self.names = Names(self)
        self.eval()
        if not self.embed_tokens.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Draws all weights afresh, as transformers' `from_config` does: matrices from a normal distribution of
        `config.initializer_range`, a padding token's embedding, biases and a router beside a selection bias zero, norms
        one. A tied head is the embedding. With a `seed` the same weights every time, and torch's own generator stays as
        it is; without one they are drawn by that.

        Raises:
            RuntimeError: weights have no memory (`model.to_empty(device=...)` gives it), or are not the model's own.
        """
        self.check_in_memory()
        hosts: dict[str, Any] = {
            name: self.get_submodule(name.rpartition(".")[0]) for name, _ in self.named_parameters()
        }  # tied: once
        for name, host in hosts.items():
            if not isinstance(host, Direct):
                raise RuntimeError(f"{name} is not the model's own, so nothing says how it starts")
        generator = None if seed is None else torch.Generator(self.embed_tokens.weight.device).manual_seed(seed)
        narrow = (2 * self.num_layers) ** -0.5 if self.config.narrow_writers else 1.0
        for name, host in hosts.items():
            share = narrow if name.endswith((".o.weight", ".down.weight")) else 1.0
            host.fill_fresh(name.rpartition(".")[2], share * self.config.initializer_range, generator)

    def check_in_memory(self) -> None:
        """Raises `RuntimeError` where weights that are about to be read are on disk, offloaded or never filled."""
        missing = [name for name, parameter in self.named_parameters() if parameter.is_meta]
        if missing:
            raise RuntimeError(
                f"{len(missing)} weights are not in memory ({missing[0]}, ...): this reads them directly, so load the "
                "model without putting parts on disk or offloading them"
            )

    # -- the forward ---------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Input,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        kv_cache: KVCache | None = None,
        return_type: str | None = "logits",
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        last_logits_only: bool = False,
        loss_per_token: bool = False,
    ) -> Any:
        """Runs the model.

        Args:
            input: text, a list of texts (left-padded together), token ids [batch seq], anything else that `read` takes,
                or with `start_at_layer` the stream [batch seq hidden_size] entering that block.
            attention_mask: [batch seq], zeros for padding. A mask given wins over the input's own. With a `kv_cache` it
                is of the new positions, or of the ones that the cache holds and the new ones.
            position_ids: [batch seq]. Without them positions count real tokens from 0. Without a mask (of the call,
                or of padded ids) or a kv_cache, a position of 0 inside a row begins another document: each sees itself
                alone.
            kv_cache: what was read before; `input` goes on from it, and is added to it. Its keys keep the rotation they
                were given, also where a longrope's factors change later.
            return_type: "logits" [batch seq vocab_size]; "loss", the mean cross-entropy over real transitions, in
                nats; "both" as a pair; or None, which runs the head only where something watches it.
            start_at_layer: the first block to run.
            stop_at_layer: the first block not to run; the answer is the stream [batch seq hidden_size] that would
                enter it. Negative numbers count from the last block.
            last_logits_only: run the head on each row's last real position alone, [batch 1 vocab_size].
            loss_per_token: the loss of each position's next token, [batch seq-1]; NaN where one of the two is padding.
        """
        first, last = self.span(start_at_layer, stop_at_layer)
        check_call(
            return_type,
            starts_inside=start_at_layer is not None,
            stops_inside=stop_at_layer is not None,
            whole=(first, last) == (0, self.num_layers),
            goes_on=kv_cache is not None,
            last_logits_only=last_logits_only,
            loss_per_token=loss_per_token,
        )
        tokens, stream, given = self._enter(input, attention_mask, kv_cache, start_at_layer)
        mask = self._watched_mask(given, stream, kv_cache)
        this, padded = self._pass(stream, given, mask, position_ids, kv_cache)
        if start_at_layer is None and self.embed_positions is not None:
            stream = stream + self._position_embeddings(stream, this)
        logits = None
        with contextlib.nullcontext() if kv_cache is None else kv_cache.reading(padded, len(stream), this.seq):
            stream = self._run_blocks(stream, this, kv_cache, first, last)
            if stop_at_layer is None:
                logits = self._read_out(stream, this.real, last_logits_only, needed=return_type is not None)
        if stop_at_layer is not None:
            return stream
        if return_type in ("logits", None):
            return logits if return_type else None
        mask = None if mask is None else mask[:, -this.seq :]
        assert logits is not None
        assert tokens is not None
        loss = next_token_loss(logits, tokens, real_transitions(mask, this.packed), loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def _enter(
        self, input: Input, mask: Tensor | None, kv_cache: KVCache | None, start_at_layer: int | None
    ) -> tuple[Tokens | None, Residual, Tensor | None]:
        """The tokens, the stream that enters the first block to run, and the mask of every position it may see."""
        if start_at_layer is not None:
            stream = checked_stream(input, self.hidden_size, self.dtype)
            return None, stream, fitting_mask(mask, stream.shape[:2], self.input_device)
        tokens, mask = self.read(input, mask)
        # In one piece, as everywhere below: rows of an expanded or unfolded tensor share memory, which a hook may edit.
        tokens = self.input_ids(tokens.to(self.input_device, torch.long).contiguous())
        self.input_size((tokens.shape[0], tokens.shape[1]))
        if kv_cache is None:
            mask = fitting_mask(mask, tokens.shape, self.input_device)
        else:
            kv_cache.check(self.config, len(tokens))
            mask = kv_cache.whole_mask(mask, *tokens.shape)
            mask = None if mask is None else mask.to(tokens.device).contiguous()
        return tokens, self._embed(tokens), mask

    def _watched_mask(self, given: Tensor | None, stream: Residual, kv_cache: KVCache | None) -> Tensor | None:
        """The mask of this pass. Where it is watched there is one to see; a written one is this pass's alone, and the
        cache goes on with the one `given`."""
        if not self.attention_mask.watched:
            return given
        past = 0 if kv_cache is None else len(kv_cache)
        ones = torch.ones(stream.shape[0], past + stream.shape[1], dtype=torch.long, device=stream.device)
        return self.attention_mask(ones if given is None else given)

    def _pass(
        self,
        stream: Residual,
        given: Tensor | None,
        mask: Tensor | None,
        position_ids: Tensor | None,
        kv_cache: KVCache | None,
    ) -> tuple[Pass, Tensor | None]:
        """What blocks may ask about, and the mask that the cache goes on with: None where it hides nothing."""
        real = real_positions(mask)
        hides = (real if mask is given else real_positions(given)) is not None
        packed = None
        if position_ids is not None:
            position_ids = checked_positions(position_ids, stream)
            packed = documents(position_ids) if given is None and kv_cache is None else None
        past = 0 if kv_cache is None else len(kv_cache)
        return Pass(stream, past, real, packed, position_ids), given if hides else None

    def span(self, start_at_layer: int | None, stop_at_layer: int | None) -> tuple[int, int]:
        """The first block that such a pass runs, and the first that it does not. Raises `ValueError` where there is
        none."""
        if len(self.layers) != self.num_layers:
            raise ValueError(
                f"the config has {self.num_layers} blocks and the model {len(self.layers)}: stop_at_layer and "
                "skip_layers leave blocks out, or build a model of a config with fewer"
            )
        return layer_span(start_at_layer, stop_at_layer, self.num_layers)

    def _embed(self, tokens: Tokens) -> Residual:
        try:
            embedded = self.embed_tokens(tokens)
        except IndexError:
            low, high = int(tokens.min()), int(tokens.max())
            raise ValueError(f"token ids run from {low} to {high}; the vocabulary has {self.vocab_size}") from None
        stream = self.token_embeddings(embedded)
        multiplier = self.config.embedding_multiplier
        if multiplier is None:
            return stream
        return stream * (rounded(multiplier, stream.dtype) if self.config.round_multiplier else multiplier)

    def _position_embeddings(self, stream: Residual, this: Pass) -> Float[Tensor, "rows seq hidden_size"]:
        learned, positions = self.config.positions, this.positions
        assert learned is not None
        assert self.embed_positions is not None
        if positions is None:
            positions = torch.arange(this.seq, device=this.device)[None]
        if this.past + this.seq > learned.count or (can_look(positions) and int(positions.max()) >= learned.count):
            last = this.past + this.seq if this.positions is None else int(positions.max()) + 1
            raise ValueError(f"the text reaches {last} positions; the model has learned {learned.count}")
        embedded = self.embed_positions(positions + learned.offset)
        if not self.position_embeddings.watched:
            return embedded
        return self.position_embeddings(embedded.expand(stream.shape).contiguous())

    def _run_blocks(self, stream: Residual, this: Pass, kv_cache: KVCache | None, first: int, last: int) -> Residual:
        made = [need.of(this) for need in self.needs]
        states = [None] * self.num_layers if kv_cache is None else kv_cache.layers
        # What is to be computed again in the backward, under activation checkpointing, knows whose hooks it has.
        again = () if torch.compiler.is_compiling() or (run := RUN.get()) is IDLE else (run,)
        blocks = itertools.islice(self.layers, first, last)
        for block, own, state in zip(blocks, self._own_needs[first:last], states[first:last], strict=True):
            stream = block(stream, *[made[need] for need in own], state, *again)
        return stream

    def _read_out(
        self, stream: Residual, padding: Tensor | None, last_only: bool, needed: bool
    ) -> Float[Tensor, "batch read vocab_size"] | None:
        """The logits; where nobody needs them, only what is watched behind the blocks."""
        head = needed or any(point.watched for point in (self.lm_head_output, self.logits, self.next_token_probs))
        if not (head or self.final_norm_scale.watched or self.final_norm_output.watched):
            return None
        final = self.final_norm_output(normed(self.norm, stream, self.final_norm_scale))
        if not head:
            return None
        read = final[:, -1:] if last_only else final
        if last_only and padding is not None and final.shape[1] > 1:
            # Laid out as the slice: what a head rounds to depends on its input's strides.
            read = laid_out_as(last_positions(final, padding), read)
        logits = self.logits(capped(self.lm_head_output(self.lm_head(read)), self.config.logit_softcap))
        if self.next_token_probs.watched:
            last = last_positions(logits, None if last_only else padding)
            self.next_token_probs(last[:, 0].softmax(-1, dtype=torch.float32))
        return logits

    def project_on_vocab(self, hidden: Float[Tensor, "*axes hidden_size"]) -> Float[Tensor, "*axes vocab_size"]:
        """The logits of a residual stream: final norm, then head, biases included, and any cap. On the last block's
        `layer_output` these are the model's logits."""
        return capped(self.lm_head(self.norm(hidden)), self.config.logit_softcap)

    def __repr__(self) -> str:
        return printout(self)

    # -- sizes and weights ---------------------------------------------------------------------------------------

    @property
    def input_device(self) -> torch.device:
        """Where token ids go: the embedding's device, or the one it is brought to when it is called."""
        hook = vars(self.embed_tokens).get("_hf_hook")
        at = getattr(hook, "execution_device", None)
        return self._embedding_tensor.device if at is None else torch.device(at)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_tensor.dtype

    @property
    def _embedding_tensor(self) -> Tensor:
        """A tensor of the embedding's, also where an adapter is in its place and has others."""
        own = self.embed_tokens._parameters.get("weight")
        return next(self.embed_tokens.parameters()) if own is None else own

    @property
    def device(self) -> torch.device:
        """Where inputs go and the stream begins; of a model on several devices, the first."""
        return self.input_device

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_heads(self) -> int:
        return self.config.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.config.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.attention.head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.config.attention.qk_head_dim

    @property
    def intermediate_size(self) -> int:
        return self.config.intermediate_size

    @property
    def W_E(self) -> Float[Tensor, "vocab_size hidden_size"]:
        return embedding_rows(self, "embed_tokens", self.vocab_size)

    @property
    def W_U(self) -> Float[Tensor, "hidden_size vocab_size"]:
        return rearrange(linear_map(self, "lm_head", self.hidden_size)[0], "vocab hidden -> hidden vocab")

    @property
    def b_U(self) -> Float[Tensor, " vocab_size"]:
        return linear_map(self, "lm_head", self.hidden_size)[1]


@kept(maxsize=None)
def rounded(number: float, dtype: torch.dtype) -> Float[Tensor, ""]:
    return torch.tensor(number, dtype=dtype, device="cpu")


def last_positions(values: Float[Tensor, "batch seq axis"], padding: Tensor | None) -> Float[Tensor, "batch 1 axis"]:
    """Each row's entry at its last real position; the last position's where a row has none."""
    seq = values.shape[1]
    if padding is None or seq == 1:
        return values[:, -1:]
    numbers = torch.arange(1, seq + 1, device=padding.device)
    at = ((padding[:, -seq:] * numbers).amax(-1) - 1) % seq
    return values.gather(1, at[:, None, None].to(values.device).expand(-1, 1, values.shape[2]))
