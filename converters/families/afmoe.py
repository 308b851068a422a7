"""AFMoE (Arcee's Trinity):  h = x + post(attention(rms(x)));  out = h + post(mlp(rms(h)))

A sandwich: four RMS norms, which multiply by their weight before they cast back. Queries and keys are normed a head; a
sigmoid gate of the block's input scales every channel of every head's output. Sliding-window blocks turn their queries
and keys, full ones do not. The first blocks are dense, the others mixtures with a shared expert, routed by sigmoids
plus a selection bias that chooses and never weighs. `mup_enabled` multiplies the embeddings by sqrt(hidden_size).
Release: https://huggingface.co/arcee-ai/Trinity-Mini
"""

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import FULL, OURS, SLIDING, THEIRS
from converters.places import Between, Output, heads_apart, side_by_side, tokens_apart
from converters.rope import rotary
from converters.rules import Copy
from transformer_std.config import Layer, Mlp, SigmoidTopK, TransformerConfig

ARCHITECTURES = ("AfmoeForCausalLM",)
WEIGHTS = parts.weights(
    parts.post_norms("post_attention_layernorm", "post_mlp_layernorm"),
    parts.router("mlp.router.gate"),
    parts.experts(),
    parts.shared_expert("mlp.shared_experts"),
    [
        Copy(THEIRS + "self_attn.gate_proj.weight", OURS + "self_attn.gate.weight"),
        Copy(THEIRS + "mlp.expert_bias", OURS + "mlp.expert_bias"),
    ],
    second="pre_mlp_layernorm",
)
GATED = {
    OURS + "self_attn.attention_gate": Output(THEIRS + "self_attn.gate_proj", view=side_by_side),
    OURS + "mlp.router_logits": Output(THEIRS + "mlp.router.gate", view=tokens_apart),
    OURS + "mlp.router_scores": Between(THEIRS + "mlp.router", "sigmoid", "output", view=tokens_apart),
    **parts.shared("mlp.shared_experts"),
    OURS + "mlp.shared_experts.mlp_ungated_output": Output(THEIRS + "mlp.shared_experts.down_proj", view=tokens_apart),
    OURS + "mlp.shared_expert_output": Output(THEIRS + "mlp.shared_experts", view=tokens_apart),
}
VALUES = parts.values(
    {**parts.sandwich("post_attention_layernorm", "post_mlp_layernorm"), **GATED},
    second="pre_mlp_layernorm",
    queries="q_norm",
    keys="k_norm",
    view=heads_apart,
)
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
DEFAULTS = {
    "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
    "num_attention_heads": 16, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 1024, "global_attn_every_n_layers": 4,
    "num_dense_layers": 1, "moe_intermediate_size": 1408, "num_shared_experts": 2, "num_experts": 64,
    "num_experts_per_tok": 6, "route_scale": 1.0, "mup_enabled": False,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("load_balance_coeff", because="balances the experts in training")
    hf.ignore("use_grouped_mm", because="how the release computes its experts, not what")
    hf.ignore("num_expert_groups", "num_limited_groups", because="older names of n_group and topk_group")
    hf.require("n_group", 1)
    hf.require("topk_group", 1)
    hf.require("score_func", "sigmoid")
    hf.require("route_norm", True)
    norm = parts.rms(hf, cast="after_weight", wide_in_half=True)
    dense, width = parts.gated(hf), hf.whole("moe_intermediate_size")
    shared = Mlp(width * hf.whole("num_shared_experts", least=0), dense.activation, "gated")
    mixture = parts.mixture(hf, SigmoidTopK(hf.number("route_scale")), shared=shared)
    rotaries = {SLIDING: rotary(hf, hf.heads()[2]), FULL: None}
    windows = {SLIDING: hf.width("sliding_window"), FULL: None}
    every = hf.whole("global_attn_every_n_layers", least=0 if hf.take("layer_types") else 1)
    by_rule = [SLIDING if every and (i + 1) % every else FULL for i in range(hf.count)]
    first = hf.whole("num_dense_layers", least=0)
    layers = [
        Layer(
            "sequential",
            norm,
            parts.attention(hf, rotary=rotaries[kind], window=windows[kind], qk_norm=norm, output_gate=True),
            dense if i < first else mixture,
            post_norm=norm,
        )
        for i, kind in enumerate(hf.layer_types(by_rule))
    ]
    multiplier = hf.whole("hidden_size") ** 0.5 if hf.flag("mup_enabled") else None
    return parts.transformer(hf, layers, norm, embedding_multiplier=multiplier)
