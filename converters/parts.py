"""What most releases share: parts of a model, read from a config with the family's DEFAULTS, and the tables of their
names. A row for a part that a model lacks is idle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from converters.hf_config import ConfigError, ConfigReader
from converters.places import Between, Input, Output, Places, View, by_heads, side_by_side, tokens_apart
from converters.rope import rotary
from converters.rules import Copy, Ignore, Rule, Stack
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Attention, Block, Mixture, Mlp, Norm, Router, TransformerConfig

THEIRS, OURS = "model.layers.{i}.", "layers.{i}."
SLIDING, FULL = "sliding_attention", "full_attention"
# Configs that a demonstration or a test makes a checkpoint of; every width is another number.
TINY = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
TINY_MIXTURE = {**TINY, "moe_intermediate_size": 56, "num_experts": 7, "num_experts_per_tok": 3}


# -- configs ---------------------------------------------------------------------------------------------------------


def rms(hf: ConfigReader, **more: Any) -> Norm:
    return Norm("rms", hf.number("rms_norm_eps"), **more)


def attention(hf: ConfigReader, **more: Any) -> Attention:
    """Grouped heads under a rotary, unless `more` says otherwise; `attention_bias`, where the family has it, is of all
    four projections."""
    heads, kv_heads, head_dim = hf.heads()
    if "attention_bias" in hf.defaults:
        bias = hf.flag("attention_bias")
        more = {"bias": bias, "output_bias": bias, **more}
    if "rotary" not in more:
        more["rotary"] = rotary(hf, head_dim)
    return Attention(heads, kv_heads, head_dim, **more)


def gated(hf: ConfigReader, width: str = "intermediate_size", activation: str = "hidden_act") -> Mlp:
    bias = "mlp_bias" in hf.defaults and hf.flag("mlp_bias")
    return Mlp(hf.whole(width), hf.one_of(activation, ACTIVATIONS), "gated", bias)


def mixture(hf: ConfigReader, router: Router, width: str = "moe_intermediate_size", **more: Any) -> Mixture:
    """Routed experts, whose number is `num_local_experts` or `num_experts`."""
    key = "num_experts" if hf.take("num_local_experts") is None else "num_local_experts"
    experts, top_k = hf.whole(key, least=0), hf.whole("num_experts_per_tok")
    if 0 < experts < top_k:
        raise ConfigError(f"config: {top_k} experts a token of {experts}")
    return Mixture(hf.whole(width), hf.one_of("hidden_act", ACTIVATIONS), experts, top_k, router, **more)


def sparse(hf: ConfigReader, dense: Mlp, mixture: Mixture) -> list[Mlp | Mixture]:
    """Each block's MLP, by `decoder_sparse_step` and `mlp_only_layers`."""
    step, only = hf.whole("decoder_sparse_step"), hf.take("mlp_only_layers", [])
    if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
        raise ConfigError(f"config.mlp_only_layers is {only!r}; {hf.family} needs a list of layer numbers")
    routed = [mixture.num_experts and i not in only and (i + 1) % step == 0 for i in range(hf.count)]
    return [mixture if each else dense for each in routed]


def windows(hf: ConfigReader, by_rule: list[str]) -> list[int | None]:
    """Each block's window, where `use_sliding_window` puts one on some; off, there is none whatever other keys say."""
    on = hf.flag("use_sliding_window")
    window = hf.width("sliding_window") if on else hf.take("sliding_window")
    return [window if on and kind == SLIDING else None for kind in hf.layer_types(by_rule)]


def upper_windows(hf: ConfigReader) -> list[int | None]:
    """As `windows`, on the blocks from `max_window_layers` up."""
    first = hf.whole("max_window_layers", least=0)
    return windows(hf, [SLIDING if i >= first else FULL for i in range(hf.count)])


def transformer(hf: ConfigReader, layers: Iterable[Block], norm: Norm, **more: Any) -> TransformerConfig:
    vocab_size = hf.whole("vocab_size")
    more.setdefault("padding_id", hf.token("pad_token_id", vocab_size))
    return TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=hf.whole("hidden_size"),
        intermediate_size=more.pop("intermediate_size", 0) or hf.whole("intermediate_size"),
        max_length=hf.whole("max_position_embeddings"),
        layers=tuple(layers),
        norm=norm,
        tied_head=hf.flag("tie_word_embeddings", hf.defaults.get("tie_word_embeddings", False)),
        initializer_range=hf.initializer_range(),
        **more,
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def both(theirs: str, ours: str, *, transposed: bool = False) -> list[Rule]:
    """A weight and its bias."""
    return [Copy(f"{theirs}.weight", f"{ours}.weight", transposed), Copy(f"{theirs}.bias", f"{ours}.bias")]


ATTENTION = [
    *both(THEIRS + "self_attn.q_proj", OURS + "self_attn.projections.q"),
    *both(THEIRS + "self_attn.k_proj", OURS + "self_attn.projections.k"),
    *both(THEIRS + "self_attn.v_proj", OURS + "self_attn.projections.v"),
    *both(THEIRS + "self_attn.o_proj", OURS + "self_attn.o"),
    *both(THEIRS + "self_attn.q_norm", OURS + "self_attn.q_norm"),
    *both(THEIRS + "self_attn.k_norm", OURS + "self_attn.k_norm"),
]
DENSE = [
    *both(THEIRS + "mlp.gate_proj", OURS + "mlp.gate"),
    *both(THEIRS + "mlp.up_proj", OURS + "mlp.up"),
    *both(THEIRS + "mlp.down_proj", OURS + "mlp.down"),
]
ENDS = [
    Copy("model.embed_tokens.weight", "embed_tokens.weight"),
    *both("model.norm", "norm"),
    *both("lm_head", "lm_head"),
    Ignore(THEIRS + "self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
    Ignore("model.rotary_emb.inv_freq", because="recomputed from the config"),
]


def weights(
    *more: list[Rule],
    first: str | None = "input_layernorm",
    second: str | None = "post_attention_layernorm",
    attention: bool = True,
) -> list[Rule]:
    """A decoder's tensors as most releases name them. `first` and `second` are the norms that read the stream; without
    `attention`, the attention's are the family's own."""
    norms = ((first, "attention_norm"), (second, "mlp_norm"))
    return [
        *ENDS,
        *[rule for theirs, ours in norms if theirs for rule in both(THEIRS + theirs, OURS + ours)],
        *(ATTENTION if attention else []),
        *DENSE,
        *[rule for rules in more for rule in rules],
    ]


def post_norms(attention: str, mlp: str) -> list[Rule]:
    """The norms that close the sublayers."""
    return [
        Copy(f"{THEIRS}{attention}.weight", OURS + "self_attn.post_norm.weight"),
        Copy(f"{THEIRS}{mlp}.weight", OURS + "mlp.post_norm.weight"),
    ]


def experts(
    released: str = "mlp.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", now: str = "mlp."
) -> list[Rule]:
    """A mixture's tensors: a matrix an expert in the `released` files, stacked as transformers 5 has them in memory,
    `now`."""
    each, ours = THEIRS + released + "experts.{e}.", OURS + "mlp."
    return [
        Stack((f"{each}{gate}.weight", f"{each}{up}.weight"), ours + "experts.gate_up"),
        Stack((f"{each}{down}.weight",), ours + "experts.down"),
        Copy(THEIRS + now + "experts.gate_up_proj", ours + "experts.gate_up"),
        Copy(THEIRS + now + "experts.down_proj", ours + "experts.down"),
    ]


def router(*theirs: str) -> list[Rule]:
    return [Copy(f"{THEIRS}{each}.weight", OURS + "mlp.router.weight") for each in theirs]


def shared_expert(theirs: str) -> list[Rule]:
    names = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    return [
        Copy(f"{THEIRS}{theirs}.{each}.weight", f"{OURS}mlp.shared_experts.{ours}.weight")
        for each, ours in names.items()
    ]


# The embeddings, of a module that multiplies them itself.
UNSCALED = Between("model.embed_tokens", "embedding", "output")


def before_rotary(queries: str, keys: str, view: View | None) -> dict[str, Places]:
    """Where queries and keys are before the rotary: the outputs of these modules, through `view`."""
    return {
        OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "self_attn." + queries, view=view),
        OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "self_attn." + keys, view=view),
    }


def values(
    more: dict[str, Places] | None = None,
    *,
    second: str = "post_attention_layernorm",
    queries: str = "q_proj",
    keys: str = "k_proj",
    view: View | None = by_heads,
) -> dict[str, Places]:
    """Where transformers has the values. `queries` and `keys`: the modules whose outputs, through `view`, are those
    before the rotary."""
    return {
        "token_embeddings": Output("model.embed_tokens"),
        OURS + "layer_input": Input("model.layers.{i}"),
        OURS + "attention_norm_output": Output(THEIRS + "input_layernorm"),
        OURS + "attention_input": Input(THEIRS + "self_attn"),
        **before_rotary(queries, keys, view),
        OURS + "self_attn.attention_premix": Input(THEIRS + "self_attn.o_proj", view=side_by_side),
        OURS + "self_attn.attention_output": Output(THEIRS + "self_attn.o_proj"),
        OURS + "layer_mid": Input(THEIRS + second, stream=True),
        OURS + "mlp_norm_output": Output(THEIRS + second),
        OURS + "mlp_input": Input(THEIRS + "mlp"),
        OURS + "mlp.mlp_preactivation": Output(THEIRS + "mlp.gate_proj"),
        OURS + "mlp.mlp_up": Output(THEIRS + "mlp.up_proj"),
        OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.act_fn"),
        OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.down_proj"),
        OURS + "mlp.mlp_output": Output(THEIRS + "mlp"),
        OURS + "layer_output": Output("model.layers.{i}"),
        "final_norm_output": Output("model.norm"),
        "lm_head_output": Output("lm_head"),
        "logits": Output(""),
        **(more or {}),
    }


def routed(module: str = "mlp.gate", function: str = "softmax") -> dict[str, Places]:
    """Where a router's values are that computes both in its own forward."""
    return {
        OURS + "mlp.router_logits": Between(THEIRS + module, "linear", "output", view=tokens_apart),
        OURS + "mlp.router_scores": Between(THEIRS + module, function, "output", view=tokens_apart),
    }


def shared(module: str) -> dict[str, Places]:
    """Where the values of a shared expert are."""
    theirs, ours = THEIRS + module, OURS + "mlp.shared_experts."
    return {
        ours + "mlp_preactivation": Output(theirs + ".gate_proj", view=tokens_apart),
        ours + "mlp_up": Output(theirs + ".up_proj", view=tokens_apart),
        ours + "mlp_activation": Output(theirs + ".act_fn", view=tokens_apart),
        ours + "mlp_neurons": Input(theirs + ".down_proj", view=tokens_apart),
        ours + "mlp_ungated_output": Output(theirs, view=tokens_apart),
    }


def sandwich(attention: str, mlp: str) -> dict[str, Places]:
    """Where the values are of sublayers that a norm closes."""
    return {
        OURS + "self_attn.attention_unnormed_output": Output(THEIRS + "self_attn.o_proj"),
        OURS + "self_attn.attention_output": Output(THEIRS + attention),
        OURS + "mlp.mlp_unnormed_output": Output(THEIRS + "mlp"),
        OURS + "mlp.mlp_output": Output(THEIRS + mlp),
    }
