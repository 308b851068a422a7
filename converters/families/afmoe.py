"""AFMoE (Arcee's Trinity):  h = x + post(attention(rms(x)));  out = h + post(mlp(rms(h)))

A sandwich: four RMS norms, which multiply by their weight before they cast back. Queries and keys are normed a head; a
sigmoid gate of the block's input scales every channel of every head's output. Sliding-window blocks turn their queries
and keys, full ones do not. The first blocks are dense, the others mixtures with a shared expert, routed by sigmoids
plus a selection bias that chooses and never weighs. `mup_enabled` multiplies the embeddings by sqrt(hidden_size).
Release: https://huggingface.co/arcee-ai/Trinity-Mini
"""

from converters.hf_config import ConfigError, ConfigReader, plain_rotary
from converters.places import Between, Input, Output, heads_apart, side_by_side, tokens_apart
from converters.rules import Copy, Ignore, Stack
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Attention, Layer, Mixture, Mlp, Norm, SigmoidTopK, TransformerConfig

ARCHITECTURES = ("AfmoeForCausalLM",)

THEIRS, OURS = "model.layers.{i}.", "layers.{i}."
EXPERT, SHARED = THEIRS + "mlp.experts.{e}.", THEIRS + "mlp.shared_experts."
OUR_SHARED = OURS + "mlp.shared_experts."

WEIGHTS = [
    Copy("model.embed_tokens.weight", "embed_tokens.weight"),
    Copy(THEIRS + "input_layernorm.weight", OURS + "attention_norm.weight"),
    Copy(THEIRS + "self_attn.q_proj.weight", OURS + "self_attn.projections.q.weight"),
    Copy(THEIRS + "self_attn.q_proj.bias", OURS + "self_attn.projections.q.bias"),
    Copy(THEIRS + "self_attn.k_proj.weight", OURS + "self_attn.projections.k.weight"),
    Copy(THEIRS + "self_attn.k_proj.bias", OURS + "self_attn.projections.k.bias"),
    Copy(THEIRS + "self_attn.v_proj.weight", OURS + "self_attn.projections.v.weight"),
    Copy(THEIRS + "self_attn.v_proj.bias", OURS + "self_attn.projections.v.bias"),
    Copy(THEIRS + "self_attn.q_norm.weight", OURS + "self_attn.q_norm.weight"),
    Copy(THEIRS + "self_attn.k_norm.weight", OURS + "self_attn.k_norm.weight"),
    Copy(THEIRS + "self_attn.gate_proj.weight", OURS + "self_attn.gate.weight"),
    Copy(THEIRS + "self_attn.o_proj.weight", OURS + "self_attn.o.weight"),
    Copy(THEIRS + "self_attn.o_proj.bias", OURS + "self_attn.o.bias"),
    Copy(THEIRS + "post_attention_layernorm.weight", OURS + "self_attn.post_norm.weight"),
    Copy(THEIRS + "pre_mlp_layernorm.weight", OURS + "mlp_norm.weight"),
    Copy(THEIRS + "mlp.router.gate.weight", OURS + "mlp.router.weight"),
    Copy(THEIRS + "mlp.expert_bias", OURS + "mlp.expert_bias"),
    Stack((EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"), OURS + "mlp.experts.gate_up"),
    Stack((EXPERT + "down_proj.weight",), OURS + "mlp.experts.down"),
    # as transformers 5 has them in memory
    Copy(THEIRS + "mlp.experts.gate_up_proj", OURS + "mlp.experts.gate_up"),
    Copy(THEIRS + "mlp.experts.down_proj", OURS + "mlp.experts.down"),
    Copy(SHARED + "gate_proj.weight", OUR_SHARED + "gate.weight"),
    Copy(SHARED + "up_proj.weight", OUR_SHARED + "up.weight"),
    Copy(SHARED + "down_proj.weight", OUR_SHARED + "down.weight"),
    # the dense first blocks
    Copy(THEIRS + "mlp.gate_proj.weight", OURS + "mlp.gate.weight"),
    Copy(THEIRS + "mlp.up_proj.weight", OURS + "mlp.up.weight"),
    Copy(THEIRS + "mlp.down_proj.weight", OURS + "mlp.down.weight"),
    Copy(THEIRS + "post_mlp_layernorm.weight", OURS + "mlp.post_norm.weight"),
    Copy("model.norm.weight", "norm.weight"),
    Copy("lm_head.weight", "lm_head.weight"),
    Ignore(THEIRS + "self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
    Ignore("model.rotary_emb.inv_freq", because="recomputed from the config"),
]

VALUES = {
    "token_embeddings": Output("model.embed_tokens"),
    OURS + "layer_input": Input("model.layers.{i}"),
    OURS + "attention_norm_output": Output(THEIRS + "input_layernorm"),
    OURS + "attention_input": Input(THEIRS + "self_attn"),
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "self_attn.q_norm", view=heads_apart),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "self_attn.k_norm", view=heads_apart),
    OURS + "self_attn.attention_gate": Output(THEIRS + "self_attn.gate_proj", view=side_by_side),
    OURS + "self_attn.attention_premix": Input(THEIRS + "self_attn.o_proj", view=side_by_side),
    OURS + "self_attn.attention_unnormed_output": Output(THEIRS + "self_attn.o_proj"),
    OURS + "self_attn.attention_output": Output(THEIRS + "post_attention_layernorm"),
    OURS + "layer_mid": Input(THEIRS + "pre_mlp_layernorm", stream=True),
    OURS + "mlp_norm_output": Output(THEIRS + "pre_mlp_layernorm"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.mlp_preactivation": Output(THEIRS + "mlp.gate_proj"),
    OURS + "mlp.mlp_up": Output(THEIRS + "mlp.up_proj"),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.act_fn"),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.down_proj"),
    OURS + "mlp.router_logits": Output(THEIRS + "mlp.router.gate", view=tokens_apart),
    OURS + "mlp.router_scores": Between(THEIRS + "mlp.router", "sigmoid", "output", view=tokens_apart),
    OUR_SHARED + "mlp_preactivation": Output(SHARED + "gate_proj", view=tokens_apart),
    OUR_SHARED + "mlp_up": Output(SHARED + "up_proj", view=tokens_apart),
    OUR_SHARED + "mlp_activation": Output(SHARED + "act_fn", view=tokens_apart),
    OUR_SHARED + "mlp_neurons": Input(SHARED + "down_proj", view=tokens_apart),
    OUR_SHARED + "mlp_ungated_output": Output(SHARED + "down_proj", view=tokens_apart),
    OURS + "mlp.shared_expert_output": Output(THEIRS + "mlp.shared_experts", view=tokens_apart),
    OURS + "mlp.mlp_unnormed_output": Output(THEIRS + "mlp"),
    OURS + "mlp.mlp_output": Output(THEIRS + "post_mlp_layernorm"),
    OURS + "layer_output": Output("model.layers.{i}"),
    "final_norm_output": Output("model.norm"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}

# A config of the family that a demonstration or a test makes a checkpoint of; every width is another number.
TINY = {
    "hidden_size": 96,
    "intermediate_size": 88,
    "moe_intermediate_size": 32,
    "num_shared_experts": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "global_attn_every_n_layers": 3,
    "mup_enabled": True,
    "route_scale": 2.826,
}


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("attention_dropout", because="dropout is for training; we have none")
    hf.ignore("load_balance_coeff", because="balances the experts in training")
    hf.ignore("use_grouped_mm", because="how the release computes its experts, not what")
    hf.ignore("num_expert_groups", "num_limited_groups", because="older names of n_group and topk_group")
    hf.require("n_group", 1)
    hf.require("topk_group", 1)
    hf.require("score_func", "sigmoid")
    hf.require("route_norm", True)
    count = hf.whole("num_hidden_layers", 32)
    hidden_size = hf.whole("hidden_size", 2048)
    heads, kv_heads, head_dim = hf.heads(hidden_size, 16, default_dim=128)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5), cast="after_weight", wide_in_half=True)
    bias = hf.flag("attention_bias", False)
    activation = hf.one_of("hidden_act", ACTIVATIONS, "silu")
    rotary, window = plain_rotary(hf.rope(theta=10_000.0), head_dim, hf.family), hf.width("sliding_window", 1024)
    dense = Mlp(hf.whole("intermediate_size", 6144), activation, kind="gated")
    width = hf.whole("moe_intermediate_size", 1408)
    mixture = Mixture(
        intermediate_size=width,
        activation=activation,
        num_experts=hf.whole("num_experts", 64),
        top_k=hf.whole("num_experts_per_tok", 6),
        router=SigmoidTopK(hf.number("route_scale", 1.0)),
        shared=Mlp(width * hf.whole("num_shared_experts", 2, least=0), activation, kind="gated"),
    )
    if mixture.top_k > mixture.num_experts:
        raise ConfigError(f"config: {mixture.top_k} experts a token of {mixture.num_experts}")
    dense_layers = hf.whole("num_dense_layers", 1, least=0)
    every = hf.whole("global_attn_every_n_layers", 4, least=0 if hf.take("layer_types") else 1)
    by_rule = ["sliding_attention" if every and (i + 1) % every else "full_attention" for i in range(count)]
    layers = tuple(
        Layer(
            "sequential",
            norm,
            Attention(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rotary=rotary if kind == "sliding_attention" else None,
                window=window if kind == "sliding_attention" else None,
                bias=bias,
                output_bias=bias,
                qk_norm=norm,
                output_gate=True,
            ),
            dense if i < dense_layers else mixture,
            post_norm=norm,
        )
        for i, kind in enumerate(hf.layer_types(count, by_rule))
    )
    vocab_size = hf.whole("vocab_size", 200192)
    return TransformerConfig(
        vocab_size=vocab_size,
        padding_id=hf.token("pad_token_id", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=dense.intermediate_size,
        max_length=hf.whole("max_position_embeddings", 16384),
        layers=layers,
        norm=norm,
        embedding_multiplier=hidden_size**0.5 if hf.flag("mup_enabled", False) else None,
        tied_head=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.initializer_range(),
    )
