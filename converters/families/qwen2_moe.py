"""Qwen2-MoE:  h = x + attention(rms(x));  y = rms(h);  out = h + experts(y) + sigmoid(gate(y)) * shared(y)

Biased queries, keys and values. The routed weights are the top entries of a float32 softmax, as they are unless
norm_topk_prob. A block is a dense MLP where mlp_only_layers or decoder_sparse_step say so.
Release: https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B
"""

from converters.hf_config import ConfigError, ConfigReader, plain_rotary
from converters.places import Between, Input, Output, by_heads, side_by_side, tokens_apart
from converters.rules import Copy, Ignore, Stack
from transformer_std.components.mlp import ACTIVATIONS
from transformer_std.config import Attention, Layer, Mixture, Mlp, Norm, SoftmaxTopK, TransformerConfig

ARCHITECTURES = ("Qwen2MoeForCausalLM",)

THEIRS, OURS = "model.layers.{i}.", "layers.{i}."
EXPERT, SHARED = THEIRS + "mlp.experts.{e}.", THEIRS + "mlp.shared_expert."
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
    Copy(THEIRS + "self_attn.o_proj.weight", OURS + "self_attn.o.weight"),
    Copy(THEIRS + "post_attention_layernorm.weight", OURS + "mlp_norm.weight"),
    Copy(THEIRS + "mlp.gate.weight", OURS + "mlp.router.weight"),
    Stack((EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"), OURS + "mlp.experts.gate_up"),
    Stack((EXPERT + "down_proj.weight",), OURS + "mlp.experts.down"),
    # as transformers 5 has them in memory
    Copy(THEIRS + "mlp.experts.gate_up_proj", OURS + "mlp.experts.gate_up"),
    Copy(THEIRS + "mlp.experts.down_proj", OURS + "mlp.experts.down"),
    Copy(SHARED + "gate_proj.weight", OUR_SHARED + "gate.weight"),
    Copy(SHARED + "up_proj.weight", OUR_SHARED + "up.weight"),
    Copy(SHARED + "down_proj.weight", OUR_SHARED + "down.weight"),
    Copy(THEIRS + "mlp.shared_expert_gate.weight", OURS + "mlp.shared_gate.weight"),
    # the dense blocks
    Copy(THEIRS + "mlp.gate_proj.weight", OURS + "mlp.gate.weight"),
    Copy(THEIRS + "mlp.up_proj.weight", OURS + "mlp.up.weight"),
    Copy(THEIRS + "mlp.down_proj.weight", OURS + "mlp.down.weight"),
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
    OURS + "self_attn.attention_queries_before_rotary": Output(THEIRS + "self_attn.q_proj", view=by_heads),
    OURS + "self_attn.attention_keys_before_rotary": Output(THEIRS + "self_attn.k_proj", view=by_heads),
    OURS + "self_attn.attention_premix": Input(THEIRS + "self_attn.o_proj", view=side_by_side),
    OURS + "self_attn.attention_output": Output(THEIRS + "self_attn.o_proj"),
    OURS + "layer_mid": Input(THEIRS + "post_attention_layernorm", stream=True),
    OURS + "mlp_norm_output": Output(THEIRS + "post_attention_layernorm"),
    OURS + "mlp_input": Input(THEIRS + "mlp"),
    OURS + "mlp.mlp_preactivation": Output(THEIRS + "mlp.gate_proj"),
    OURS + "mlp.mlp_up": Output(THEIRS + "mlp.up_proj"),
    OURS + "mlp.mlp_activation": Output(THEIRS + "mlp.act_fn"),
    OURS + "mlp.mlp_neurons": Input(THEIRS + "mlp.down_proj"),
    OURS + "mlp.router_logits": Between(THEIRS + "mlp.gate", "linear", "output", view=tokens_apart),
    OURS + "mlp.router_scores": Between(THEIRS + "mlp.gate", "softmax", "output", view=tokens_apart),
    OUR_SHARED + "mlp_preactivation": Output(SHARED + "gate_proj", view=tokens_apart),
    OUR_SHARED + "mlp_up": Output(SHARED + "up_proj", view=tokens_apart),
    OUR_SHARED + "mlp_activation": Output(SHARED + "act_fn", view=tokens_apart),
    OUR_SHARED + "mlp_neurons": Input(SHARED + "down_proj", view=tokens_apart),
    OUR_SHARED + "mlp_ungated_output": Output(THEIRS + "mlp.shared_expert", view=tokens_apart),
    OURS + "mlp.shared_expert_gate": Output(THEIRS + "mlp.shared_expert_gate", view=tokens_apart),
    OURS + "mlp.shared_expert_output": Between(THEIRS + "mlp", "add", "second", view=tokens_apart),
    OURS + "mlp.mlp_output": Output(THEIRS + "mlp"),
    OURS + "layer_output": Output("model.layers.{i}"),
    "final_norm_output": Output("model.norm"),
    "lm_head_output": Output("lm_head"),
    "logits": Output(""),
}

# A config of the family that a demonstration or a test makes a checkpoint of; every width is another number.
TINY = {
    "hidden_size": 96,
    "intermediate_size": 88,
    "moe_intermediate_size": 56,
    "shared_expert_intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("attention_dropout", because="dropout is for training; we have none")
    count = hf.whole("num_hidden_layers", 24)
    hidden_size = hf.whole("hidden_size", 2048)
    heads, kv_heads, head_dim = hf.heads(hidden_size, 16, 16)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    activation = hf.one_of("hidden_act", ACTIVATIONS, "silu")
    rotary = plain_rotary(hf.rope(theta=10_000.0), head_dim, hf.family)
    bias = hf.flag("qkv_bias", True)
    dense = Mlp(hf.whole("intermediate_size", 5632), activation, kind="gated")
    mixture = Mixture(
        intermediate_size=hf.whole("moe_intermediate_size", 1408),
        activation=activation,
        num_experts=hf.whole("num_experts", 60, least=0),
        top_k=hf.whole("num_experts_per_tok", 4),
        router=SoftmaxTopK(normalized=hf.flag("norm_topk_prob", False)),
        shared=Mlp(hf.whole("shared_expert_intermediate_size", 5632, least=0), activation, kind="gated"),
        shared_gate=True,
        shared_first=True,
    )
    if 0 < mixture.num_experts < mixture.top_k:
        raise ConfigError(f"config: {mixture.top_k} experts a token of {mixture.num_experts}")
    step, only = hf.whole("decoder_sparse_step", 1), hf.take("mlp_only_layers", [])
    if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
        raise ConfigError(f"config.mlp_only_layers is {only!r}; qwen2_moe needs a list of layer numbers")
    dense_layers = set(only)
    layers = tuple(
        Layer(
            "sequential",
            norm,
            Attention(heads, kv_heads, head_dim, rotary=rotary, window=window, bias=bias),
            mixture if mixture.num_experts and i not in dense_layers and (i + 1) % step == 0 else dense,
        )
        for i, window in enumerate(_windows(hf, count))
    )
    vocab_size = hf.whole("vocab_size", 151936)
    return TransformerConfig(
        vocab_size=vocab_size,
        padding_id=hf.token("pad_token_id", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=dense.intermediate_size,
        max_length=hf.whole("max_position_embeddings", 32768),
        layers=layers,
        norm=norm,
        tied_head=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.initializer_range(),
    )


def _windows(hf: ConfigReader, count: int) -> list[int | None]:
    """The window of each block; with `use_sliding_window` off there is none, whatever the other keys say."""
    on = hf.flag("use_sliding_window", False)
    window = hf.width("sliding_window", 4096) if on else hf.take("sliding_window")
    below = hf.whole("max_window_layers", 28, least=0)
    by_rule = ["sliding_attention" if i % 2 == 0 and i < below else "full_attention" for i in range(count)]
    return [window if on and kind == "sliding_attention" else None for kind in hf.layer_types(count, by_rule)]
