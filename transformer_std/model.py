"""The hooked model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from transformer_std.analysis import Analysis
from transformer_std.components.blocks import BLOCKS
from transformer_std.components.functions import (
    documents,
    prompt_angles,
    real_positions,
    rotary_angles,
    seen_keys,
    visible,
)
from transformer_std.components.norms import build_norm
from transformer_std.components.tracing import can_look
from transformer_std.config import TransformerConfig
from transformer_std.generation import Generation
from transformer_std.hook_points import HookPoint, laid_out_as
from transformer_std.hooking import Hooked
from transformer_std.kv_cache import KVCache
from transformer_std.layouts import Logits, NextTokenProbs, Residual, Size, Tokens
from transformer_std.modules import Direct, Embedding, Linear
from transformer_std.names import Names
from transformer_std.patching import Patching
from transformer_std.printing import printout
from transformer_std.runs import IDLE, RUN
from transformer_std.text import Text, checked_mask
from transformer_std.weights import embedding_rows, linear_map

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Text, a list of texts, token ids [batch seq], or with `start_at_layer` the stream [batch seq hidden_size].
Input = Any


class HookedTransformer(Hooked, Text, Analysis, Patching, Generation):
    """A decoder-only transformer whose every standard value is read and written by name.

    `HookedTransformer(config, seed=0)` has fresh weights, see `init_weights`; `HookedTransformer.from_pretrained` loads
    a checkpoint. Models start in eval mode.
    """

    host = "model"

    input_ids = HookPoint(Tokens, "The token ids the model was called with")
    attention_mask = HookPoint(Tokens, "The attention mask of the call; zeros are padding")
    input_size = HookPoint(Size, "(batch, seq) of the call; read-only", write="input_ids")
    token_embeddings = HookPoint(Residual, "The embedding's output, before any multiplier")
    final_norm_output = HookPoint(Residual, "The residual stream after the final norm, what the head reads")
    lm_head_output = HookPoint(Logits, "The head's output")
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
        self.layers = nn.ModuleList(BLOCKS[each.kind](each, config.hidden_size, eager) for each in config.layers)
        self.norm = build_norm(config.norm, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.lm_head.weight = self.embed_tokens.weight
        # What blocks share in a pass is computed once: angles by rotary, masks by window.
        self._rotaries = list(dict.fromkeys(each.attention.rotary for each in config.layers))
        self._windows = list(dict.fromkeys(each.attention.window for each in config.layers))
        self._kinds = [
            (self._rotaries.index(each.attention.rotary), self._windows.index(each.attention.window))
            for each in config.layers
        ]
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
        hosts = {name: self.get_submodule(name.rpartition(".")[0]) for name, _ in self.named_parameters()}  # tied: once
        for name, host in hosts.items():
            if not isinstance(host, Direct):
                raise RuntimeError(f"{name} is not the model's own, so nothing says how it starts")
        generator = None if seed is None else torch.Generator(self.embed_tokens.weight.device).manual_seed(seed)
        for name, host in hosts.items():
            host.fill_fresh(name.rpartition(".")[2], self.config.initializer_range, generator)  # type: ignore[operator]

    @classmethod
    def from_pretrained(
        cls,
        source: Any,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        device_map: str | dict[str, Any] | None = None,
        max_memory: dict[Any, Any] | None = None,
        offload_folder: str | Path | None = None,
        revision: str | None = None,
        attn_implementation: str = "sdpa",
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    ) -> HookedTransformer:
        """Loads a checkpoint.

        Args:
            source: a folder (a Hugging Face checkpoint's or one that `save_pretrained` wrote), a weights file in one, a
                Hub id, or a live transformers model, whose tensors are then shared.
            dtype: torch's or its name, "bfloat16"; None or "auto" keeps the config's, or else the tensors' own.
            device: None keeps the weights memory-mapped on the CPU.
            device_map: "auto", or a dict from parts of the tree (`layers.3`) to devices, "cpu" or "disk": the model is
                spread over them by accelerate (extra `big`). `max_memory` limits each device, as accelerate takes it;
                what is put on "disk" goes to `offload_folder`.
            revision: branch, tag or commit of a Hub id.
            attn_implementation: "sdpa", or "eager" for the open path everywhere, as transformers' eager attention.
            tokenizer: one to use in place of the checkpoint's own, or where to find it.

        Raises:
            converters.CheckpointError: a file or tensor that is missing, left over, or not what the family has.
            converters.ConfigError: a config that no converter understands.
        """
        import converters

        return converters.load(
            source,
            dtype=dtype,
            device=device,
            device_map=device_map,
            max_memory=max_memory,
            offload_folder=offload_folder,
            revision=revision,
            attn_implementation=attn_implementation,
            tokenizer=tokenizer,
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config, weights and tokenizer in our own format; `from_pretrained` reads it back, without
        transformers.

        Whole or not at all: however it is stopped, and whoever else saves there, `folder` holds this model or what it
        held before. An earlier save of ours there is replaced, with its tokenizer; other files are left alone.

        Raises:
            RuntimeError: weights that are not in memory.
            ValueError: weights that are not plain tensors, as the config describes them (adapters, parametrisations,
                shards), or a folder that holds a checkpoint in another format.
        """
        from transformer_std import saving

        saving.save(self, folder)

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
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type is {return_type!r}; give 'logits', 'loss', 'both' or None")
        if last_logits_only and return_type in ("loss", "both"):
            raise ValueError("the loss needs the logits of every position: leave out last_logits_only")
        if loss_per_token and return_type not in ("loss", "both"):
            raise ValueError(f"loss_per_token goes with return_type 'loss' or 'both', not {return_type!r}")
        if start_at_layer is not None and stop_at_layer is None and return_type in ("loss", "both"):
            raise ValueError("the loss needs the tokens, and with start_at_layer there are none: take the logits")
        first, last = self._span(start_at_layer, stop_at_layer)
        if kv_cache is not None and (first, last) != (0, self.num_layers):
            raise ValueError("a kv_cache needs all layers: leave out start_at_layer and stop_at_layer")
        tokens = None
        if start_at_layer is None:
            tokens, attention_mask = self._read_input(input, attention_mask, kv_cache)
            stream = self._embed(tokens)
        else:
            stream = self._check_stream(input)
            attention_mask = self._check_mask(attention_mask, stream.shape[:2])
        given = attention_mask
        if self.attention_mask.watched:
            batch, seq = stream.shape[0], stream.shape[1] + (0 if kv_cache is None else len(kv_cache))
            ones = torch.ones(batch, seq, dtype=torch.long, device=stream.device)
            attention_mask = self.attention_mask(ones if attention_mask is None else attention_mask)
        padding, seq = real_positions(attention_mask), stream.shape[1]
        logits, packed = None, None
        if position_ids is not None:
            position_ids = self._check_positions(position_ids, stream)
            packed = documents(position_ids) if given is None and kv_cache is None else None
        with contextlib.nullcontext() if kv_cache is None else kv_cache.undone_on_error():
            stream = self._run_blocks(stream, padding, packed, position_ids, kv_cache, first, last)
            if stop_at_layer is None:
                logits = self._read_out(stream, padding, last_logits_only, needed=return_type is not None)
            if kv_cache is not None:
                padded = padding if attention_mask is given else real_positions(given)
                kv_cache.advance(None if padded is None else given, len(stream), seq)
        if stop_at_layer is not None:
            return stream
        if return_type in ("logits", None):
            return logits if return_type else None
        mask = None if attention_mask is None else attention_mask[:, -tokens.shape[1] :]
        loss = next_token_loss(logits, tokens, real_transitions(mask, packed), loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def _read_input(
        self, input: Input, attention_mask: Tensor | None, kv_cache: KVCache | None
    ) -> tuple[Tokens, Tensor | None]:
        tokens, attention_mask = self.read(input, attention_mask)
        # In one piece, as everywhere below: rows of an expanded or unfolded tensor share memory, which a hook may edit.
        tokens = self.input_ids(tokens.to(self.input_device, torch.long).contiguous())
        self.input_size((tokens.shape[0], tokens.shape[1]))
        if kv_cache is not None:
            kv_cache.check(self.config, len(tokens))
            mask = kv_cache.whole_mask(attention_mask, *tokens.shape)
            return tokens, None if mask is None else mask.to(tokens.device).contiguous()
        return tokens, self._check_mask(attention_mask, tokens.shape)

    def _check_mask(self, mask: Tensor | None, size: Sequence[int]) -> Tensor | None:
        if mask is not None and tuple(checked_mask(mask).shape) != tuple(size):
            raise ValueError(f"the attention_mask is {list(mask.shape)}; the input is {list(size)} [batch seq]")
        return None if mask is None else mask.to(self.input_device).contiguous()

    def _check_positions(self, positions: Tensor, stream: Residual) -> Int[Tensor, "batch seq"]:
        if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
            raise TypeError("position_ids are whole numbers in a tensor [batch seq]")
        if positions.ndim != 2 or positions.shape[0] not in (1, len(stream)) or positions.shape[1] != stream.shape[1]:
            raise ValueError(
                f"position_ids are {list(positions.shape)}; the input is {list(stream.shape[:2])} [batch seq]"
            )
        return positions.to(stream.device).expand(stream.shape[:2])

    def _check_stream(self, input: Any) -> Residual:
        if not isinstance(input, Tensor) or input.ndim != 3 or input.shape[-1] != self.hidden_size:
            got = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(f"with start_at_layer the input is the stream [batch seq {self.hidden_size}], not {got}")
        if input.numel() == 0 or input.dtype != self.dtype:
            dtype = self.dtype
            raise ValueError(
                f"the stream is {list(input.shape)} {input.dtype}; the model reads at least one position of {dtype}"
            )
        return input.contiguous()

    def _span(self, start: int | None, stop: int | None) -> tuple[int, int]:
        def bound(name: str, layer: int | None, default: int) -> int:
            if layer is not None and not isinstance(layer, int):
                raise TypeError(f"{name} is {layer!r}: give a layer's number")
            at = default if layer is None else layer + self.num_layers if layer < 0 else layer
            if not 0 <= at <= self.num_layers:
                raise ValueError(f"{name} is {layer}; the model has {self.num_layers} layers")
            return at

        if len(self.layers) != self.num_layers:
            raise ValueError(
                f"the config has {self.num_layers} blocks and the model {len(self.layers)}: stop_at_layer and "
                "skip_layers leave blocks out, or build a model of a config with fewer"
            )
        first, last = bound("start_at_layer", start, 0), bound("stop_at_layer", stop, self.num_layers)
        if first > last:
            raise ValueError(f"start_at_layer {start} is past stop_at_layer {stop}")
        return first, last

    def _embed(self, tokens: Tokens) -> Residual:
        try:
            embedded = self.embed_tokens(tokens)
        except IndexError:
            low, high = int(tokens.min()), int(tokens.max())
            raise ValueError(f"token ids run from {low} to {high}; the vocabulary has {self.vocab_size}") from None
        stream = self.token_embeddings(embedded)
        multiplier = self.config.embedding_multiplier
        return stream if multiplier is None else stream * multiplier

    def _run_blocks(
        self,
        stream: Residual,
        padding: Tensor | None,
        packed: Tensor | None,
        position_ids: Tensor | None,
        kv_cache: KVCache | None,
        first: int,
        last: int,
    ) -> Residual:
        seq, dtype, device = stream.shape[1], stream.dtype, stream.device
        past = 0 if kv_cache is None else len(kv_cache)
        if position_ids is None and padding is None and not past:
            angles = [rotary and prompt_angles(rotary, seq, dtype, device) for rotary in self._rotaries]
        else:
            if position_ids is None and padding is None:
                position_ids = torch.arange(past, past + seq, device=device)[None]
            elif position_ids is None:
                position_ids = (padding.cumsum(-1) - 1).clamp(min=0)[:, past:]
            angles = [rotary and rotary_angles(rotary, position_ids, dtype) for rotary in self._rotaries]
        masks = [
            visible(padding, seq, seen_keys(past, seq, window), window, device, packed) for window in self._windows
        ]
        layer_caches = [None] * self.num_layers if kv_cache is None else kv_cache.layers
        kinds = zip(self._kinds[first:last], layer_caches[first:last], strict=True)
        # What is to be computed again in the backward, under activation checkpointing, knows whose hooks it has.
        again = () if torch.compiler.is_compiling() or (run := RUN.get()) is IDLE else (run,)
        blocks = itertools.islice(self.layers, first, last)
        for block, ((rotary, window), cache) in zip(blocks, kinds, strict=True):
            stream = block(stream, angles[rotary], masks[window], cache, *again)
        return stream

    def _read_out(
        self, stream: Residual, padding: Tensor | None, last_only: bool, needed: bool
    ) -> Float[Tensor, "batch read vocab_size"] | None:
        """The logits; where nobody needs them, only what is watched behind the blocks."""
        head = needed or any(point.watched for point in (self.lm_head_output, self.logits, self.next_token_probs))
        if not (head or self.final_norm_output.watched):
            return None
        normed = self.final_norm_output(self.norm(stream))
        if not head:
            return None
        read = normed[:, -1:] if last_only else normed
        if last_only and padding is not None and normed.shape[1] > 1:
            # Laid out as the slice: what a head rounds to depends on its input's strides.
            read = laid_out_as(last_positions(normed, padding), read)
        logits = self.logits(self.lm_head_output(self.lm_head(read)))
        if self.next_token_probs.watched:
            last = last_positions(logits, None if last_only else padding)
            self.next_token_probs(last[:, 0].softmax(-1, dtype=torch.float32))
        return logits

    def project_on_vocab(self, hidden: Float[Tensor, "*axes hidden_size"]) -> Float[Tensor, "*axes vocab_size"]:
        """The logits of a residual stream: final norm, then head, biases included. On the last block's `layer_output`
        these are the model's logits."""
        return self.lm_head(self.norm(hidden))

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
        return self.config.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.config.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.layers[0].attention.head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.config.layers[0].attention.head_dim

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


def last_positions(values: Float[Tensor, "batch seq axis"], padding: Tensor | None) -> Float[Tensor, "batch 1 axis"]:
    """Each row's entry at its last real position; the last position's where a row has none."""
    seq = values.shape[1]
    if padding is None or seq == 1:
        return values[:, -1:]
    numbers = torch.arange(1, seq + 1, device=padding.device)
    at = ((padding[:, -seq:] * numbers).amax(-1) - 1) % seq
    return values.gather(1, at[:, None, None].to(values.device).expand(-1, 1, values.shape[2]))


def real_transitions(mask: Tensor | None, packed: Tensor | None) -> Bool[Tensor, "batch transitions"] | None:
    """False where one of two neighbours is padding, or of another document; None where there is neither."""
    real = None if mask is None else mask[:, :-1].bool() & mask[:, 1:].bool()
    return real if packed is None else packed[:, :-1] == packed[:, 1:]


def next_token_loss(
    logits: Logits, tokens: Tokens, real: Bool[Tensor, "batch transitions"] | None, per_token: bool = False
) -> Float[Tensor, ""] | Float[Tensor, "batch transitions"]:
    """Cross-entropy, in nats and float32, of each real token given the real tokens before it: the mean, or
    `per_token`, with NaN where there is none."""
    seen = real is not None and can_look(real)
    if tokens.shape[1] == 1 or (seen and not real.any()):
        raise ValueError("the loss needs two real tokens in a row, and no row of the input has them")
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none")
    if per_token:
        return losses if real is None else losses.masked_fill(~real, torch.nan)
    if real is None:
        return losses.mean()
    # Where nobody looks, no tensor's size can hang on the mask; without a real transition the mean is then NaN.
    return losses[real].mean() if seen else losses.where(real, 0).sum() / real.sum()
