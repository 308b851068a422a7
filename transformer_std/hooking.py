"""Hooks on a model and the cache of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from transformer_std.analysis.decomposition import ActivationCache
from transformer_std.hooks.hook_point import Handle, HookFn
from transformer_std.hooks.names import NamesFilter, UnknownName
from transformer_std.hooks.runs import RUN, Scope, begins_run, close, for_one_run, open_around
from transformer_std.inputs import Input
from transformer_std.kv_cache import KVCache
from transformer_std.transformer import Transformer

if TYPE_CHECKING:
    Pairs = Iterable[tuple[NamesFilter, HookFn]]

    class Forward(TypedDict, total=False):
        """What `forward` takes beside its input and `return_type`."""

        attention_mask: Tensor | None
        position_ids: Tensor | None
        kv_cache: KVCache | None
        start_at_layer: int | None
        stop_at_layer: int | None
        last_logits_only: bool
        loss_per_token: bool

    class Cached(Forward, total=False):
        """What `run_with_cache` takes beside."""

        names_filter: NamesFilter
        incl_bwd: bool
        device: torch.device | str | None
        remove_batch_dim: bool
        keep_graph: bool

    One = Literal["logits", "loss"]
else:
    Pairs = Any


class Hooked(Transformer):
    """A transformer whose values are read and written by name.

    `add_hook` attaches to the model: every run hears it, on every thread. What `hooks`, `run_with_hooks` and
    `run_with_cache` attach is heard by the runs of this context, or by that one run; not by another thread, nor by a
    model that runs inside a hook.
    """

    if TYPE_CHECKING:

        @overload
        def __call__(self, input: Input, *, return_type: One = ..., **forward: Unpack[Forward]) -> Tensor: ...
        @overload
        def __call__(
            self, input: Input, *, return_type: Literal["both"], **forward: Unpack[Forward]
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(self, input: Input, *, return_type: None, **forward: Unpack[Forward]) -> Tensor | None: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    else:

        @begins_run
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    def add_hook(self, name: NamesFilter, fn: HookFn, *, permanent: bool = False, backward: bool = False) -> Handle:
        """Attaches `fn(value, hook)` to every hook point that `name` means.

        `fn` returns the new value, or None to leave it (or after editing it in place). A permanent hook survives
        `reset_hooks`. With `backward` it is `fn(gradient, hook)`, called in the backward.

        Returns:
            A handle; `handle.remove()` detaches the hook.
        """
        return self._attach(Handle(_function(fn), backward=backward, permanent=permanent), name)

    def _attach(self, handle: Handle, name: NamesFilter) -> Handle:
        targets = self.names.targets(name)
        if not targets:
            raise UnknownName(f"{name!r} means no value of this model, so the hook could never fire")
        for target in targets:
            target.point.check_takes(handle)
        for target in targets:
            handle.attach(target.point, target.adapt)
        return handle

    def reset_hooks(self, *, including_permanent: bool = False) -> None:
        """Detaches every hook that is not permanent: those of `add_hook`, and those of the `with` blocks that are open
        in this context. What belongs to one run, or to another thread, stays."""
        around = {scope.token for scope in RUN.get().around}
        for handle in {each.handle for point in self.names.points.values() for each in point._handles}:
            if (handle.scope is None or handle.scope in around) and (including_permanent or not handle.permanent):
                handle.remove()

    @contextlib.contextmanager
    def hooks(self, fwd_hooks: Pairs = (), bwd_hooks: Pairs = ()) -> Iterator[Hooked]:
        """Hooks for the length of a `with`, on the runs of this context; both arguments are lists of
        `(names_filter, fn)`. A thread that is started inside has a context of its own, and hears `add_hook` alone."""
        with self._attached(fwd_hooks, bwd_hooks) as scope:
            open_around(scope)
            try:
                yield self
            finally:
                close(scope)
                for handle in scope.handles:
                    handle.remove()

    @contextlib.contextmanager
    def _attached(self, fwd_hooks: Pairs, bwd_hooks: Pairs) -> Iterator[Scope]:
        scope = Scope()
        try:
            for argument, pairs in (("fwd_hooks", fwd_hooks), ("bwd_hooks", bwd_hooks)):
                for pair in pairs:
                    name, fn = _as_pair(pair, argument)
                    self._attach(Handle(_function(fn), backward=argument == "bwd_hooks", scope=scope), name)
            yield scope
        finally:
            for handle in scope.handles:
                handle.detach()

    @overload
    def run_with_hooks(
        self,
        input: Input,
        *,
        fwd_hooks: Pairs = ...,
        bwd_hooks: Pairs = ...,
        return_type: One = ...,
        **forward: Unpack[Forward],
    ) -> Tensor: ...
    @overload
    def run_with_hooks(
        self,
        input: Input,
        *,
        fwd_hooks: Pairs = ...,
        bwd_hooks: Pairs = ...,
        return_type: Literal["both"],
        **forward: Unpack[Forward],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def run_with_hooks(
        self,
        input: Input,
        *,
        fwd_hooks: Pairs = ...,
        bwd_hooks: Pairs = ...,
        return_type: None,
        **forward: Unpack[Forward],
    ) -> Tensor | None: ...

    def run_with_hooks(self, input: Input, *, fwd_hooks: Pairs = (), bwd_hooks: Pairs = (), **forward: Any) -> Any:
        """One forward with hooks, which are gone from the model afterwards; no other run hears them.

        Backward hooks stay with this run's graph and fire when `backward()` is called on its output.
        """
        fwd_hooks, bwd_hooks = list(fwd_hooks), list(bwd_hooks)
        with self._attached(fwd_hooks, bwd_hooks) as scope:
            for name, _ in (*fwd_hooks, *bwd_hooks):
                self._check_reached(name, forward)
            with for_one_run(scope):
                return self(input, **forward)

    def _check_reached(self, names_filter: NamesFilter, forward: dict[str, Any]) -> None:
        """Raises `UnknownName` for a value that is named one by one in a block that this pass does not run."""
        start, stop = forward.get("start_at_layer"), forward.get("stop_at_layer")
        if start is None and stop is None:
            return
        first, last = self.span(start, stop)
        for point in self.names.explicit(names_filter):
            if point.layer is not None and not first <= point.layer < last:
                raise UnknownName(f"{point.name} is not reached: this pass runs layers {first} to {last - 1}")

    @overload
    def run_with_cache(
        self, input: Input, *, return_type: One = ..., **options: Unpack[Cached]
    ) -> tuple[Tensor, ActivationCache]: ...
    @overload
    def run_with_cache(
        self, input: Input, *, return_type: Literal["both"], **options: Unpack[Cached]
    ) -> tuple[tuple[Tensor, Tensor], ActivationCache]: ...
    @overload
    def run_with_cache(
        self, input: Input, *, return_type: None, **options: Unpack[Cached]
    ) -> tuple[Tensor | None, ActivationCache]: ...

    def run_with_cache(
        self,
        input: Input,
        *,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        keep_graph: bool = False,
        **forward: Any,
    ) -> tuple[Any, ActivationCache]:
        """One forward that keeps the values `names_filter` means.

        Args:
            names_filter: a full name, a value name (every layer that has it), a `(value, layer)` pair, a glob, a list
                of these, or a function of the full name; None for all.
            incl_bwd: keep gradients too, as `name_grad`; where all values are kept, not of the derived ones, which
                the forward goes on without. With `return_type="loss"` the backward is run here; else the entries
                appear when `backward()` is called on something made of the output.
            device: where the cached tensors go; the model stays.
            remove_batch_dim: for a batch of one, values without the batch axis.
            keep_graph: cached tensors stay in the autograd graph; else they are detached.

        Returns:
            What `forward` returns, and the cache. Watching `attention_scores` or `attention_probabilities` makes that
            block compute its attention openly, which rounds differently from sdpa; load with
            `attn_implementation="eager"` where the two must match.
        """
        points = self.names.resolve(names_filter)
        self._check_reached(names_filter, forward)
        cache = ActivationCache({}, self.names, self, gone=frozenset({"batch"} if remove_batch_dim else ()))
        kv_cache = forward.get("kv_cache")
        graded = [each for each in points if incl_bwd and not (names_filter is None and each.derived)]
        with cache.recording(points, gradients=graded, device=device, keep_graph=keep_graph, kv_cache=kv_cache):
            output = self(input, **forward)
        if incl_bwd:
            self._check_graph(output)
            if isinstance(output, Tensor) and output.ndim == 0:
                output.backward()
        return output, cache

    def _check_graph(self, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        if not any(isinstance(each, Tensor) and each.requires_grad for each in outputs if each is not None):
            raise RuntimeError(
                "incl_bwd needs gradients, and nothing in this run has any: all parameters are frozen, gradients are "
                "switched off, or return_type is None; model.requires_grad_(True) thaws the parameters"
            )

    def get_name(self, value: str, layer: int | None = None) -> str:
        """The full name of `value`, on `layer` if it is a block's: `get_name("mlp_output", 3)`."""
        return self.names.one(value if layer is None else (value, layer)).point.name

    def support(self, layer: int | None = None) -> dict[str, Any]:
        """Which values there are: name -> None, or {layer: why it has none}. With `layer`, name -> None or why not.
        Nothing runs."""
        return self.names.support(layer)


def _function(fn: Any) -> HookFn:
    if not callable(fn):
        raise TypeError(f"a hook is a function fn(value, hook), not {fn!r}")
    return fn


def _as_pair(pair: Any, argument: str) -> tuple[Any, HookFn]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{argument} is a list of pairs (names_filter, fn); {pair!r} is none")
    return pair[0], pair[1]
