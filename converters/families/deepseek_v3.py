"""DeepSeek V3, R1:  h = x + attention(rms(x));  out = h + mlp(rms(h))

Keys and values of all heads come of one normed latent a token, and queries of another. Of each query the last
dimensions turn; the turned part of the keys is one for all heads. The first blocks are dense, the others mixtures with
a shared expert: sigmoids in float32 and a selection bias choose groups of experts, then experts. Released in fp8, which
has to be made plain first; the release's last block, which foretells a second token, is passed over.
Release: https://huggingface.co/deepseek-ai/DeepSeek-V3
"""

from converters import parts
from converters.hf_config import ConfigError, ConfigReader
from converters.parts import OURS, THEIRS, both
from converters.places import Between, Output, Places, by_heads, last, tokens_apart
from converters.rope import growth, rotary
from converters.rules import Beyond, Copy
from transformer_std.config import GroupedSigmoid, LatentAttention, Layer, Mlp, Norm, TransformerConfig

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
ATTN = "self_attn."
WEIGHTS = parts.weights(
    both(THEIRS + ATTN + "q_proj", OURS + ATTN + "q"),
    both(THEIRS + ATTN + "q_a_proj", OURS + ATTN + "q.down"),
    both(THEIRS + ATTN + "q_a_layernorm", OURS + ATTN + "q.norm"),
    both(THEIRS + ATTN + "q_b_proj", OURS + ATTN + "q.up"),
    both(THEIRS + ATTN + "kv_a_proj_with_mqa", OURS + ATTN + "kv_down"),
    both(THEIRS + ATTN + "kv_a_layernorm", OURS + ATTN + "kv_norm"),
    both(THEIRS + ATTN + "kv_b_proj", OURS + ATTN + "kv_up"),
    both(THEIRS + ATTN + "o_proj", OURS + ATTN + "o"),
    parts.router("mlp.gate"),
    parts.experts(),
    parts.shared_expert("mlp.shared_experts"),
    [
        Copy(THEIRS + "mlp.gate.e_score_correction_bias", OURS + "mlp.expert_bias"),
        Beyond(THEIRS, because="of the blocks that foretell more tokens than the next, for speculative decoding"),
    ],
    attention=False,
)
LATENT: dict[str, Places] = {
    OURS + ATTN + "attention_queries_before_rotary": [
        Output(THEIRS + ATTN + "q_b_proj", view=by_heads), Output(THEIRS + ATTN + "q_proj", view=by_heads),
    ],
    OURS + ATTN + "attention_latent": Output(THEIRS + ATTN + "kv_a_layernorm"),
    OURS + ATTN + "attention_shared_keys": Output(THEIRS + ATTN + "kv_a_proj_with_mqa", view=last),
}  # fmt: skip
MIXTURE = {
    OURS + "mlp.router_logits": Between(THEIRS + "mlp.gate", "linear", "output", view=tokens_apart),
    OURS + "mlp.router_scores": Between(THEIRS + "mlp.gate", "sigmoid", "output", view=tokens_apart),
    **parts.shared("mlp.shared_experts"),
    OURS + "mlp.shared_expert_output": Output(THEIRS + "mlp.shared_experts", view=tokens_apart),
    OURS + "mlp.shared_experts.mlp_ungated_output": Output(THEIRS + "mlp.shared_experts.down_proj", view=tokens_apart),
}
VALUES = parts.values({**LATENT, **MIXTURE})
TINY = {
    "hidden_size": 96, "intermediate_size": 88, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 12, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "q_lora_rank": 28, "kv_lora_rank": 40,
    "qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim": 24, "routed_scaling_factor": 2.5,
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "num_local_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_interleave": True, "attention_bias": False,
}  # fmt: skip
SPELLED = {"num_local_experts": "n_routed_experts"}


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("num_nextn_predict_layers", "num_mtp_layers", because="blocks past the last, which we pass over")
    hf.ignore("aux_loss_alpha", "seq_aux", because="balances the experts in training")
    hf.ignore("ep_size", because="over how many devices the experts lay")
    hf.require("moe_layer_freq", 1)
    hf.require("topk_method", "noaux_tc")
    hf.require("scoring_func", "sigmoid")
    norm, dense = parts.rms(hf), parts.gated(hf)
    attention, mixture, first = latent_attention(hf), grouped(hf, dense), hf.whole("first_k_dense_replace", least=0)
    layers = [Layer("sequential", norm, attention, dense if i < first else mixture) for i in range(hf.count)]
    return parts.transformer(hf, layers, norm)


def latent_attention(hf: ConfigReader) -> LatentAttention:
    heads, plain, turned = (hf.whole(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    hf.require("num_key_value_heads", heads)
    hf.require("head_dim", turned)
    hf.require("qk_head_dim", plain + turned)
    bias, grown = hf.flag("attention_bias"), growth(hf)
    return LatentAttention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hf.whole("v_head_dim"),
        rotary=rotary(hf, turned, pairs="neighbours_apart" if hf.flag("rope_interleave") else "halves"),
        bias=bias,
        output_bias=bias,
        scale=(plain + turned) ** -0.5 * grown * grown,
        norm=Norm("rms", 1e-6),
        latent_size=hf.whole("kv_lora_rank"),
        query_size=hf.optional_whole("q_lora_rank"),
        plain_dims=plain,
    )


def grouped(hf: ConfigReader, dense: Mlp) -> parts.Mixture:
    groups, open_groups = hf.whole("n_group"), hf.whole("topk_group")
    router = GroupedSigmoid(hf.number("routed_scaling_factor"), groups, open_groups, hf.flag("norm_topk_prob"))
    shared = Mlp(hf.whole("moe_intermediate_size") * hf.whole("n_shared_experts"), dense.activation, "gated")
    mixture = parts.mixture(hf, router, shared=shared, shared_last=True)
    left = open_groups * mixture.num_experts // groups
    if mixture.num_experts % groups or mixture.num_experts < 2 * groups or left < mixture.top_k or open_groups > groups:
        raise ConfigError(
            f"config: {mixture.top_k} experts a token of {open_groups} groups of {groups}, of {mixture.num_experts} in "
            "all; groups are equal, and of two experts at least"
        )
    return mixture
