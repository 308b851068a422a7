"""A tensor whose axes have names and labels: what every sweep gives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_std.hooks import transformer_lens

Label = Any  # a number, a text, or a position and its token's text
SHOWN = 8  # entries in a printout
ELEMENTWISE = {  # their answer has an entry where each argument has one
    "abs", "add", "bfloat16", "clamp", "clone", "contiguous", "cpu", "detach", "div", "double", "exp", "float",
    "half", "log", "maximum", "minimum", "mul", "nan_to_num", "neg", "positive", "pow", "rsub", "sigmoid", "sign",
    "sqrt", "sub", "tanh", "to", "true_divide", "type", "where", "__add__", "__mul__", "__neg__", "__pow__",
    "__radd__", "__rdiv__", "__rmul__", "__rpow__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__",
}  # fmt: skip


class Axis(NamedTuple):
    """An axis of a sweep: `layer`, `seq`, `num_heads`, ...; and the label of each place on it."""

    name: str
    labels: tuple[Label, ...]

    def find(self, wanted: Label) -> int:
        """The place of a label; of a position with its token either will do. Raises `KeyError`."""
        found = [i for i, label in enumerate(self.labels) if label == wanted or _is_part(label, wanted)]
        if len(found) == 1:
            return found[0]
        what = "is on no place" if not found else f"is on {len(found)} places"
        raise KeyError(f"{wanted!r} {what} of the axis {self.name}: it has {_listed(self.labels)}")


def _is_part(label: Label, wanted: Label) -> bool:
    return isinstance(label, tuple) and any(type(each) is type(wanted) and each == wanted for each in label)


def _listed(labels: Sequence[Label]) -> str:
    shown = ", ".join(map(repr, labels[:SHOWN]))
    return f"{shown}, ... ({len(labels)})" if len(labels) > SHOWN else shown


class Sweep(torch.Tensor):
    """A tensor, wherever one is taken, that also says what its axes are.

        found = model.activation_patching(corrupted, cache, "layer_input", metric)
        found[3, " John"], found.at(layer=3, seq=5), found - found.baseline, found.to_pandas()

    Elementwise arithmetic and indexing keep the labels; what any other function of torch makes of it is a plain tensor.

    Attributes:
        axes: name and labels of each axis, in order.
        what: what was swept, for the printout.
        baseline: the metric where nothing was changed, where that is known.
        clean: the metric of the clean run, where that is known.
    """

    axes: tuple[Axis, ...]
    what: str
    baseline: Tensor | None
    clean: Tensor | None

    @staticmethod
    def of(
        values: Tensor,
        axes: Sequence[tuple[str, Sequence[Label]]],
        what: str = "",
        baseline: Tensor | None = None,
        clean: Tensor | None = None,
    ) -> Sweep:
        """Raises `ValueError` where labels and values differ in number."""
        named = tuple(Axis(name, tuple(labels)) for name, labels in axes)
        if (shape := tuple(len(axis.labels) for axis in named)) != tuple(values.shape):
            raise ValueError(f"labels for {list(shape)} places, values {list(values.shape)}")
        sweep = values.detach().as_subclass(Sweep)
        sweep.axes, sweep.what, sweep.baseline, sweep.clean = named, what, baseline, clean
        return sweep

    @property
    def values(self) -> Tensor:  # type: ignore[override]  # torch's own is of sparse tensors alone
        """The plain tensor."""
        return _plain(self)

    def at(self, **labels: Label) -> Any:
        """What lies at the labels, by the axes' names or TransformerLens' for them; the other axes stay.

        Raises:
            KeyError: an axis or a label that there is none of.
        """
        names = [each.name for each in self.axes]
        wanted = {transformer_lens.axis(name, names): label for name, label in labels.items()}
        if unknown := [name for name in wanted if name not in names]:
            raise KeyError(f"there is no axis {unknown[0]!r}: the axes are {', '.join(names)}")
        chosen = [each.find(wanted[each.name]) if each.name in wanted else slice(None) for each in self.axes]
        return self[tuple(chosen)]

    def to_pandas(self) -> Any:
        """A Series of one axis, else a DataFrame whose columns are the last; the axes before it are its index."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas") from None
        if not self.axes:
            raise ValueError("this sweep is one number: take it by float()")
        indices = [pandas.Index(list(map(_text, axis.labels)), name=axis.name) for axis in self.axes]
        values = self.values.cpu().numpy()
        if len(indices) == 1:
            return pandas.Series(values, index=indices[0], name=self.what or None)
        rows = indices[0] if len(indices) == 2 else pandas.MultiIndex.from_product(indices[:-1])
        return pandas.DataFrame(values.reshape(len(rows), -1), index=rows, columns=indices[-1])

    def top(self, k: int = SHOWN) -> list[tuple[tuple[Label, ...], float]]:
        """The `k` entries farthest from the baseline, or from zero, with their labels; the farthest first."""
        flat = self.values.flatten()
        known = self.baseline is not None and self.baseline.ndim == 0
        far = (flat - self.baseline.to(flat)).abs() if known and self.baseline is not None else flat.abs()
        places = far.nan_to_num(-1.0).topk(min(k, len(flat))).indices
        each = zip(*torch.unravel_index(places, self.values.shape), strict=True) if self.axes else [()] * len(places)
        labels = [tuple(axis.labels[int(i)] for axis, i in zip(self.axes, place, strict=True)) for place in each]
        return list(zip(labels, flat[places].tolist(), strict=True))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own takes more
        sizes = ", ".join(f"{axis.name} {len(axis.labels)}" for axis in self.axes)
        known = [("baseline", self.baseline), ("clean", self.clean)]
        told = [f"{name} {float(value):.4g}" for name, value in known if value is not None and value.ndim == 0]
        head = f"Sweep [{sizes}]" + "".join(f", {each}" for each in (*([self.what] if self.what else []), *told))
        lines = []
        for labels, value in self.top():
            where = ", ".join(f"{axis.name} {_text(label)}" for axis, label in zip(self.axes, labels, strict=True))
            lines.append(f"  {value:>10.4g}  {where}")
        more = [f"  ... and {self.numel() - SHOWN} more"] if self.numel() > SHOWN else []
        return "\n".join([head, *lines, *more])

    def __format__(self, spec: str) -> str:
        return format(self.values.item() if self.ndim == 0 else str(self), spec)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(each, str) for each in parts):
            if Ellipsis in parts or len(parts) > len(self.axes):
                raise KeyError(f"labels go axis by axis: {', '.join(axis.name for axis in self.axes)}")
            parts = tuple(
                axis.find(each) if isinstance(each, str) else each for axis, each in zip(self.axes, parts, strict=False)
            )
        plain = self.values[parts]
        kept = _indexed(self.axes, parts)
        return plain if kept is None else Sweep.of(plain, kept, self.what, self.baseline, self.clean)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (self.values, self.axes, self.what, self.baseline, self.clean)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sweep:
        return Sweep.of(self.values.clone(), self.axes, self.what, self.baseline, self.clean)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = [_plain(each) for each in args]
        answer = func(*plain, **{name: _plain(each) for name, each in kwargs.items()})
        sweeps = [each for each in (*args, *kwargs.values()) if isinstance(each, Sweep)]
        if not sweeps or not isinstance(answer, Tensor) or getattr(func, "__name__", "") not in ELEMENTWISE:
            return answer
        first = max(sweeps, key=lambda sweep: sweep.ndim)
        if answer.shape != first.shape or not hasattr(first, "axes"):
            return answer
        return Sweep.of(answer, first.axes, first.what)


def _again(values: Tensor, axes: Any, what: str, baseline: Any, clean: Any) -> Sweep:
    return Sweep.of(values, axes, what, baseline, clean)


def _plain(x: Any) -> Any:
    if isinstance(x, Sweep):
        with torch._C.DisableTorchFunctionSubclass():
            return x.as_subclass(Tensor)
    if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
        return type(x)(_plain(each) for each in x)
    return x


def _indexed(axes: tuple[Axis, ...], parts: tuple[Any, ...]) -> list[Axis] | None:
    """The axes that an index leaves; None where it makes new ones."""
    if any(each is None for each in parts):
        return None
    if (spread := sum(each is Ellipsis for each in parts)) > 1:
        return None
    if spread:
        at = next(i for i, each in enumerate(parts) if each is Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (len(axes) - len(parts) + 1), *parts[at + 1 :])
    parts = (*parts, *[slice(None)] * (len(axes) - len(parts)))
    lists = sum(isinstance(each, (list, range)) or (isinstance(each, Tensor) and each.ndim > 0) for each in parts)
    kept = []
    for axis, each in zip(axes, parts, strict=False):
        if isinstance(each, slice):
            kept.append(Axis(axis.name, axis.labels[each]))
        elif isinstance(each, Tensor) and each.ndim == 1 and not each.dtype.is_floating_point and lists == 1:
            chosen = each.nonzero().flatten() if each.dtype == torch.bool else each
            kept.append(Axis(axis.name, tuple(axis.labels[i] for i in chosen.tolist())))
        elif isinstance(each, (list, range)) and lists == 1 and all(isinstance(i, int) for i in each):
            kept.append(Axis(axis.name, tuple(axis.labels[i] for i in each)))
        else:
            try:
                operator.index(each)  # this axis goes
            except TypeError:
                return None
    return kept


def _text(label: Label) -> str:
    return f"{label[0]} {label[1]!r}" if isinstance(label, tuple) else str(label)
