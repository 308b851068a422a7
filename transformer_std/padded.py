"""Token ids that know which of them are padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Operations that move ids about and leave each as it is: the mask moves with them.
MOVES = {
    "__getitem__", "cat", "chunk", "clone", "concat", "concatenate", "contiguous", "cpu", "cuda", "detach", "expand",
    "expand_as", "flatten", "flip", "gather", "index_select", "int", "long", "narrow", "permute", "pin_memory",
    "repeat", "repeat_interleave", "reshape", "roll", "select", "split", "squeeze", "stack", "swapaxes",
    "take_along_dim", "tensor_split", "tile", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
WRITES = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__ifloordiv__",
    "__imod__",
    "__iand__",
    "__ior__",
    "__ixor__",
}


# Those that put ids, the last argument, somewhere.
PUTS = {"__setitem__", "copy_", "fill_", "masked_fill_", "index_fill_", "index_copy_", "scatter_"}


class PaddedTokens(Tensor):
    """Token ids of several lengths, padded, as `to_tokens` gives them. The model reads their mask with them.

    Slices, copies, other devices, `torch.cat` and whatever else moves ids about keep the mask; ids that are joined to
    them count as real, and so does one that is written over padding. Ids computed otherwise (`torch.where`, sums) have
    lost it (`mask` is None), and the model refuses them without an `attention_mask`. `.tolist()` and
    `.as_subclass(torch.Tensor)` give bare ids.
    """

    mask: Tensor | None

    @staticmethod
    def of(tokens: Tensor, mask: Tensor | None) -> PaddedTokens:
        """`tokens` with their `mask`, zeros for padding; None: it is lost."""
        padded = Tensor._make_subclass(PaddedTokens, tokens)
        padded.mask = mask
        return padded

    @staticmethod
    def parts(tokens: Tensor, needs_mask: bool = True) -> tuple[Tensor, Tensor | None]:
        """A plain tensor of `tokens`, and their mask, None where they are plain.

        Raises:
            ValueError: `needs_mask`, and they were padded and lost it.
        """
        if not isinstance(tokens, PaddedTokens):
            return tokens, None
        mask = tokens.mask
        if mask is None and needs_mask:
            raise ValueError(
                "these ids were made of padded ones, and what made them lost their mask: pass attention_mask, or bare "
                "ids, tokens.as_subclass(torch.Tensor)"
            )
        return Tensor._make_subclass(Tensor, tokens), mask

    @classmethod
    def __torch_function__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if _writes(fn) and isinstance(first, PaddedTokens):
                return _write(fn, first, args, kwargs)
            result = fn(*args, **kwargs)
            masks = None
            if fn.__name__ in MOVES and (mask := _mask_of(first)) is not None:
                masks = fn(mask, *args[1:], **{key: value for key, value in kwargs.items() if key != "out"})
            return _plain(result) if _makes_new(fn) else _carrying(result, masks)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, PaddedTokens.parts(self, needs_mask=False)


def _rebuilt(tokens: Tensor, mask: Tensor | None) -> PaddedTokens:
    return PaddedTokens.of(tokens, mask)


torch.serialization.add_safe_globals([_rebuilt])


def _writes(fn: Callable[..., Any]) -> bool:
    name = fn.__name__
    return name in WRITES or (name.endswith("_") and not name.endswith("__"))


def _makes_new(fn: Callable[..., Any]) -> bool:
    """Whether the ids are only the pattern for others."""
    return fn.__name__.endswith("_like") or fn.__name__.startswith("new_")


def _write(fn: Callable[..., Any], tokens: PaddedTokens, args: Any, kwargs: Any) -> Any:
    """Writes the same to the mask: that of padded ids, and 1 for bare ones. In place, so that slices and what they are
    slices of see it."""
    mask = tokens.mask
    if mask is not None and fn.__name__ in PUTS and not kwargs:
        *where, put = args[1:]
        if isinstance(put, PaddedTokens):
            tokens.mask = None if put.mask is None else mask
            real: Any = put.mask if put.mask is None else put.mask.clone()
        else:
            real = torch.ones_like(put) if isinstance(put, Tensor) else 1
        if tokens.mask is not None:
            fn(mask, *where, real)
        return fn(*args)
    before = tokens.clone()
    result = fn(*args, **kwargs)
    if mask is not None:
        mask.masked_fill_(before != tokens, 1)
    return result


def _plain(result: Any) -> Any:
    return result.as_subclass(Tensor) if isinstance(result, PaddedTokens) else result


def _mask_of(given: Any) -> Any:
    """The mask of a tensor, or of each in a list; of bare ids ones. None where it is lost."""
    if isinstance(given, PaddedTokens):
        return given.mask
    if not isinstance(given, (list, tuple)):
        return None
    masks = [each.mask if isinstance(each, PaddedTokens) else torch.ones_like(each) for each in given]
    return None if any(mask is None for mask in masks) else masks


def _carrying(result: Any, masks: Any) -> Any:
    if isinstance(result, (list, tuple)) and all(isinstance(each, Tensor) for each in result):
        masks = [None] * len(result) if masks is None else masks
        return type(result)([_carrying(*each) for each in zip(result, masks, strict=True)])
    if isinstance(result, Tensor) and result.dtype in (torch.int64, torch.int32):
        return PaddedTokens.of(result, masks)
    return _plain(result)
