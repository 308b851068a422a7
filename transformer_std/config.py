"""What to build: frozen dataclasses, one entry a block. No torch here, so a config can be read in a moment."""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

FORMAT = 3  # of `to_dict`; 1 had no number and no tags, 2 had longrope's settings among the rotary's own
TAG = "is"  # in the place of one of several classes: which of them


@dataclass(frozen=True)
class Norm:
    """`kind` "rms" (no mean, no bias) or "layer". `cast` says where an RMS norm returns to the stream's dtype:
    before its weight is multiplied in, or after. `wide_in_half`: in a float16 model the weight stays float32.
    `around_one`: what is multiplied in is one plus the weight, in float32."""

    kind: Literal["rms", "layer"]
    eps: float
    cast: Literal["before_weight", "after_weight"] = "before_weight"
    wide_in_half: bool = False
    around_one: bool = False


@dataclass(frozen=True)
class Scaling:
    """How a rotary is stretched to more positions than it was trained on, `original_length`. `scale` multiplies cos and
    sin."""

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def restart(self) -> int | None:
        """The length past which a generation reads its text again, since its positions are turned otherwise there."""
        return None


@dataclass(frozen=True)
class Linear(Scaling):
    """All frequencies are divided by `factor` (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Dynamic(Scaling):
    """In a pass past `original_length` positions, theta grows with the pass (NTK-aware)."""

    factor: float
    original_length: int


@dataclass(frozen=True)
class Llama3(Scaling):
    """Waves longer than `original_length` / `low` are stretched by `factor`, shorter than / `high` are not, and those
    between in proportion (Llama 3.1, https://arxiv.org/abs/2407.21783)."""

    factor: float
    low: float
    high: float
    original_length: int


@dataclass(frozen=True)
class Yarn(Scaling):
    """Dimensions that turn fewer than `slow` times in `original_length` positions are stretched by `factor`, those that
    turn more than `fast` times are not, and those between in proportion (https://arxiv.org/abs/2309.00071).
    `truncate`: the bounds are whole numbers."""

    factor: float
    original_length: int
    scale: float = 1.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope(Scaling):
    """`short_factors` and `long_factors` divide the frequencies, one factor a pair of dimensions
    (https://arxiv.org/abs/2402.13753); the long ones and `long_scale` serve every position of a pass that reaches past
    `original_length` positions. `rereads`: a generation that comes there reads its text again."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    scale: float = 1.0
    long_scale: float = 1.0
    rereads: bool = False

    @property
    def restart(self) -> int | None:
        return self.original_length if self.rereads else None


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first `dims` dimensions of a head (https://arxiv.org/abs/2104.09864).

    `pairs`: dimension i turns with i + dims / 2, or with its neighbour; "neighbours_apart": the first of all neighbours
    come before the second, once they are turned. `wide`: it turns in float32. `contiguous`: what
    is turned lies head after head in memory, which decides how later products round.
    """

    dims: int
    theta: float
    scaling: Scaling | None = None
    pairs: Literal["halves", "neighbours", "neighbours_apart"] = "halves"
    wide: bool = False
    contiguous: bool = False


@dataclass(frozen=True)
class Attention:
    """`fused`: one matrix for queries, keys and values, all heads' queries first, or head after head. `window`: how
    many keys a query sees, itself included. `qk_norm_over`: each head is normed alone, or all heads side by side.
    `scale` multiplies the scores, None: head_dim ** -0.5; with `scaled_queries` the queries instead. `wide_scores`: the
    open path has the scores in float32. `softcap`: a tanh caps the scores. `sinks`: each head has a learned score more,
    which takes its share of the softmax and has no value. `openly`: never by a fused kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary | None = None
    window: int | None = None
    fused: Literal[False, True, "by_head"] = False
    bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    output_gate: bool = False
    qk_norm_over: Literal["head", "heads"] = "head"
    scale: float | None = None
    scaled_queries: bool = False
    wide_scores: bool = False
    softcap: float | None = None
    sinks: bool = False
    openly: bool = False

    @property
    def qk_head_dim(self) -> int:
        """The width of a head's queries and keys."""
        return self.head_dim

    @property
    def open_always(self) -> bool:
        return self.openly or self.softcap is not None or self.sinks


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Keys and values are projections of a latent, normed by `norm`, of `latent_size` dimensions a token; queries of
    one of `query_size`, or None, of the stream. The rotary turns the last dimensions of queries and keys alone, and
    these of the keys are the same for all heads; `plain_dims` come before them. `head_dim` is that of the values. The
    biases are those of the projections that read or write the stream."""

    norm: Norm
    latent_size: int
    query_size: int | None
    plain_dims: int
    rotary: Rotary

    @property
    def qk_head_dim(self) -> int:
        return self.plain_dims + self.rotary.dims


@dataclass(frozen=True)
class Mlp:
    """`kind`: "plain" down(act(up(x))), "gated" down(act(gate(x)) * up(x)), or "fused" (gated, gate and up in one)."""

    intermediate_size: int
    activation: str
    kind: Literal["plain", "gated", "fused"]
    bias: bool = False


@dataclass(frozen=True)
class SparseMixer:
    """Two slots in turn; an expert within 2 * `jitter` of a slot's best shares its softmax. `input_jitter` is the
    relative noise of the input in training."""

    scoring: ClassVar[str] = "sparsemixer"
    jitter: float
    input_jitter: float = 0.0


@dataclass(frozen=True)
class SoftmaxTopK:
    """The top entries of a softmax over all experts, `normalized` to sum to one or as they are. `wide`: they stay in
    float32, and so do the experts' outputs that they weigh."""

    scoring: ClassVar[str] = "softmax"
    normalized: bool
    wide: bool = False


@dataclass(frozen=True)
class SigmoidTopK:
    """The top sigmoids after a selection bias; without it they are divided by their sum and multiplied by `scale`."""

    scoring: ClassVar[str] = "sigmoid"
    scale: float


@dataclass(frozen=True)
class GroupedSigmoid:
    """As `SigmoidTopK`, among the experts of the `top_groups` of `groups` whose two best sum to most; the router's
    matrix and its logits are float32 always. `normalized`: the weights are divided by their sum."""

    scoring: ClassVar[str] = "sigmoid"
    scale: float
    groups: int
    top_groups: int
    normalized: bool


@dataclass(frozen=True)
class TopKSoftmax:
    """A softmax over the top logits alone."""

    scoring: ClassVar[str] = "chosen"


Router = SparseMixer | SoftmaxTopK | SigmoidTopK | GroupedSigmoid | TopKSoftmax


@dataclass(frozen=True)
class Clamp:
    """In the place of act(gate) * up: gate * sigmoid(`alpha` * gate) * (up + 1), of a gate that is at most `limit`, and
    an up within it. The two lie interleaved, neuron after neuron."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Mixture:
    """`top_k` of `num_experts` gated MLPs a token, each `intermediate_size` wide, beside an optional `shared` one that
    every token runs through; `shared_gate`: times a sigmoid of the token. `shared_first`: it runs before the router,
    `shared_last`: after the experts, else between, since the gradients of an input add up in the order of its uses.
    `bias`: of the router and of the experts."""

    intermediate_size: int
    activation: str
    num_experts: int
    top_k: int
    router: Router
    shared: Mlp | None = None
    shared_gate: bool = False
    shared_first: bool = False
    shared_last: bool = False
    bias: bool = False
    clamp: Clamp | None = None


@dataclass(frozen=True)
class Block:
    """An entry of a model's `layers`. Its `kind` names the class that is built of it."""

    kind: str


@dataclass(frozen=True)
class Layer(Block):
    """A block that attends. `norm` reads the stream before each sublayer; `post_norm`, where set, closes each sublayer
    before its output is added: with both it is a sandwich, and a "post_normed" block has the second alone."""

    kind: Literal["sequential", "parallel", "parallel_two_norms", "post_normed"]
    norm: Norm | None
    attention: Attention
    mlp: Mlp | Mixture
    post_norm: Norm | None = None


@dataclass(frozen=True)
class Positions:
    """Learned embeddings of `count` positions, added to the tokens'; the first has row `offset`."""

    count: int
    offset: int = 0


@dataclass(frozen=True)
class Origin:
    """Which release a model came from: the converter's name and the release's own config and generation config, so that
    they can be written back."""

    family: str
    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def special(self) -> dict[str, Any]:
        """The special tokens' ids; the generation config's, where it has them."""
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {key: self.generation.get(key, self.config.get(key)) for key in keys}


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer.

    `intermediate_size` is the release's headline number; each block's own is in its entry. `max_length` is the context
    in tokens; nothing that is built grows with it, save learned `positions`. The embeddings are multiplied by
    `embedding_multiplier`, rounded to their dtype where `round_multiplier` says so. `logit_softcap`: a tanh caps the
    logits. The embedding of `padding_id` gets no gradient. A fresh model's matrices are noise of the standard deviation
    `initializer_range`; with `narrow_writers` those that write to the stream of less, by sqrt(2 num_layers).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_length: int
    layers: tuple[Block, ...]
    norm: Norm
    positions: Positions | None = None
    embedding_multiplier: float | None = None
    round_multiplier: bool = False
    logit_softcap: float | None = None
    tied_head: bool = False
    head_bias: bool = False
    padding_id: int | None = None
    dtype: str | None = None
    initializer_range: float = 0.02
    narrow_writers: bool = False
    origin: Origin | None = field(default=None, compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attending(self) -> list[Layer]:
        """The blocks that attend."""
        return [each for each in self.layers if isinstance(each, Layer)]

    @property
    def attention(self) -> Attention:
        """That of the first block that has one. Raises `AttributeError` where none has."""
        found = next((each.attention for each in self.attending), None)
        if found is None:
            raise AttributeError("no block of this model attends")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON, with the number of their format."""
        return {"format": FORMAT, **_plain(TransformerConfig, self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TransformerConfig:
        """The inverse of `to_dict`, of any version: a field that was added since takes its default.

        Raises:
            TypeError: a field that there is none of.
        """
        given = dict(values)
        number = given.pop("format", 1)
        if number in (1, 2):
            given["layers"] = [_since_3(layer) for layer in given["layers"]]
        try:
            return _build(cls, given)
        except TypeError as error:
            newer = f"; it is of format {number}, and this version of transformer_std reads {FORMAT}"
            raise TypeError(f"{error}{newer if number != FORMAT else ''}") from None


def _since_3(layer: Any) -> Any:
    """A block as formats 1 and 2 had it, whose rotary had longrope's settings among its own, as format 3 has it."""
    match layer:
        case {"attention": {"rotary": {"joined": contiguous, "short_factors": short, **old}, **attention}}:
            rotary = {"dims": old["dims"], "theta": old["theta"], "contiguous": contiguous}
            if short is not None:
                scales = {"scale": old["short_scale"], "long_scale": old["long_scale"]}
                factors = {"short_factors": short, "long_factors": old["long_factors"]}
                longrope = {"original_length": old["original_length"], **factors, **scales, "rereads": True}
                rotary["scaling"] = {TAG: "LongRope", **longrope}
            return {**layer, "attention": {**attention, "rotary": rotary}}
    return layer


def _classes(kind: Any) -> list[Any]:
    """The dataclasses that a field of the annotated type `kind` may hold."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return [cls for option in typing.get_args(kind) for cls in _classes(option)]
    if "__dataclass_fields__" not in dir(kind):
        return []
    return [kind, *(cls for each in kind.__subclasses__() for cls in _classes(each))]


def _plain(kind: Any, value: Any) -> Any:
    """The inverse of `_build`."""
    if typing.get_origin(kind) is tuple:
        return [_plain(typing.get_args(kind)[0], item) for item in value]
    if isinstance(value, tuple):  # of an optional one
        return list(value)
    if not (classes := _classes(kind)) or value is None:
        return copy.deepcopy(value)
    hints = typing.get_type_hints(type(value))
    fields = {each.name: _plain(hints[each.name], getattr(value, each.name)) for each in dataclasses.fields(value)}
    return {TAG: type(value).__name__, **fields} if len(classes) > 1 else fields


def _build(kind: Any, value: Any) -> Any:
    """`value` from JSON as the annotated type `kind`. Of several dataclasses the one that the tag names, or, in what
    had no tags yet, the one whose fields it has."""
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    if isinstance(value, list) and not isinstance(kind, type):  # an optional tuple
        return tuple(value)
    if not (classes := _classes(kind)) or value is None:
        return value
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} stands in the place of {classes[0].__name__}")
    given = dict(value)
    if (tag := given.pop(TAG, None)) is None:
        cls = max(classes, key=lambda each: sum(field.name in given for field in dataclasses.fields(each)))
    elif tag in (named := {each.__name__: each for each in classes}):
        cls = named[tag]
    else:
        raise TypeError(f"there is no {tag!r} here")
    hints = typing.get_type_hints(cls)
    if unknown := [name for name in given if name not in hints]:
        raise TypeError(f"{cls.__name__} has no field {unknown[0]!r}")
    return cls(**{name: _build(hints[name], item) for name, item in given.items()})
