"""What one does with a model: reading streams as tokens, skipping blocks, steering, taking experts out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_std.decomposition import bias_logits
from transformer_std.hook_points import HookPoint

Positions = int | Sequence[int] | slice | Tensor | None
Hooks = list[tuple[tuple[str, int], Any]]


class Analysis:
    """The part of a model that analyses; it leans on its hooks and its text."""

    names: Any
    layers: Any

    @property
    def bias_logits(self) -> Float[Tensor, " vocab_size"]:
        """The constant that the final norm's bias and the head's add to every readout, whatever the stream."""
        return bias_logits(self)  # type: ignore[arg-type]

    def get_topk_closest_tokens(self, hidden: Float[Tensor, "*axes hidden_size"], k: int = 5) -> list[Any]:
        """The `k` likeliest next tokens of a stream, read out by the final norm and the head: pairs of text and
        probability; nested lists where `hidden` has more axes than the last."""
        probabilities = self.project_on_vocab(hidden).detach().softmax(-1, dtype=torch.float32)  # type: ignore[attr-defined]
        return self._named(*probabilities.topk(k, dim=-1))

    def probs_to_dict(self, probabilities: Float[Tensor, " vocab_size"], k: int = 5) -> dict[str, float]:
        """The `k` likeliest tokens of a distribution, `cache["next_token_probs"][0]` say: text -> probability."""
        return dict(self._named(*probabilities.topk(k)))

    def _named(self, values: Tensor, ids: Tensor) -> list[Any]:
        if ids.ndim > 1:
            return [self._named(*each) for each in zip(values, ids, strict=True)]
        decode = self.tokenizer.decode  # type: ignore[attr-defined]
        return [(decode([int(each)]), float(value)) for each, value in zip(ids, values, strict=True)]

    @contextlib.contextmanager
    def skip_layers(
        self, first: int, last: int, skip_with: Float[Tensor, "batch seq hidden_size"] | None = None
    ) -> Iterator[None]:
        """Blocks `first` to `last`, both included, hand on the stream that entered them, or `skip_with`. They still
        run, and their hooks fire; a key/value cache stays whole."""
        entered: dict[str, Tensor] = {}

        def enter(stream: Tensor, hook: HookPoint) -> None:
            entered["stream"] = stream

        def leave(stream: Tensor, hook: HookPoint) -> Tensor:
            return entered["stream"] if skip_with is None else skip_with

        index = self.names._index
        if index(first) > index(last):
            raise ValueError(f"there are no layers from {first} to {last}")
        with self.hooks(fwd_hooks=[(("layer_input", first), enter), (("layer_output", last), leave)]):  # type: ignore[attr-defined]
            yield

    @contextlib.contextmanager
    def steer(
        self,
        layers: int | Sequence[int],
        vector: Tensor,
        factor: float = 1.0,
        token_positions: Positions = None,
        batch_index: Positions = None,
    ) -> Iterator[None]:
        """Adds `factor * vector` to the stream leaving each of `layers`, at some positions and rows or at all.

        Positions are columns of the input, padding included, so that -1 is every row's last token under left padding.
        In generation they are the prompt's, and the tokens after it are steered only where `token_positions` is None.
        """
        if vector.shape != (self.hidden_size,):  # type: ignore[attr-defined]
            raise ValueError(f"the vector is {list(vector.shape)}; the stream has {self.hidden_size} dimensions")  # type: ignore[attr-defined]
        rows = slice(None) if batch_index is None else [batch_index] if isinstance(batch_index, int) else batch_index

        prompt = 0

        def add(stream: Tensor, hook: HookPoint) -> Tensor | None:
            nonlocal prompt
            prompt = stream.shape[1] if hook.step == 0 else prompt
            if token_positions is not None and stream.shape[1] < prompt:
                return None  # a step that reads the new token alone
            change = torch.zeros_like(stream)
            some = change[rows]
            if token_positions is None:
                some[:] = factor * vector.to(stream)
            else:
                some[:, :prompt][:, token_positions] = factor * vector.to(stream)
            change[rows] = some
            return stream + change

        layers = [layers] if isinstance(layers, int) else layers
        with self.hooks(fwd_hooks=[([("layer_output", layer) for layer in layers], add)]):  # type: ignore[attr-defined]
            yield

    def ablate_expert(self, layer: int, expert: int) -> Hooks:
        """Hooks that take `expert` of block `layer` out wherever it is chosen: its slots weigh nothing."""
        self._check_expert(layer, expert)
        chosen: dict[str, Tensor] = {}

        def look(indices: Tensor, hook: HookPoint) -> None:
            chosen["indices"] = indices

        def silence(weights: Tensor, hook: HookPoint) -> Tensor:
            return weights.masked_fill(chosen["indices"] == expert, 0)

        return [(("expert_indices", layer), look), (("expert_weights", layer), silence)]

    def reroute(self, layer: int, expert: int, to: int) -> Hooks:
        """Hooks that send every slot of block `layer` that chose `expert` to expert `to`, at the weight it had."""
        self._check_expert(layer, expert)
        self._check_expert(layer, to)
        return [(("expert_indices", layer), lambda indices, hook: indices.masked_fill(indices == expert, to))]

    def _check_expert(self, layer: int, expert: int) -> None:
        self.names.at("expert_indices", layer)
        count = self.layers[layer].mlp.num_experts
        if not 0 <= expert < count:
            raise ValueError(f"expert {expert} is out of range: block {layer} has experts 0 to {count - 1}")
