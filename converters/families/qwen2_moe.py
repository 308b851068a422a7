"""Qwen2-MoE:  h = x + attention(rms(x));  y = rms(h);  out = h + experts(y) + sigmoid(gate(y)) * shared(y)

Biased queries, keys and values. The routed weights are the top entries of a float32 softmax, as they are unless
norm_topk_prob. A block is a dense MLP where mlp_only_layers or decoder_sparse_step say so.
Release: https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B
"""

import dataclasses

from converters import parts
from converters.hf_config import ConfigReader
from converters.parts import FULL, OURS, SLIDING, THEIRS
from converters.places import Between, Output, tokens_apart
from converters.rules import Copy
from transformer_std.config import Layer, SoftmaxTopK, TransformerConfig

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
WEIGHTS = parts.weights(
    parts.router("mlp.gate"),
    parts.experts(),
    parts.shared_expert("mlp.shared_expert"),
    [Copy(THEIRS + "mlp.shared_expert_gate.weight", OURS + "mlp.shared_gate.weight")],
)
SHARED = {
    **parts.shared("mlp.shared_expert"),
    OURS + "mlp.shared_expert_gate": Output(THEIRS + "mlp.shared_expert_gate", view=tokens_apart),
    OURS + "mlp.shared_expert_output": Between(THEIRS + "mlp", "add", "second", view=tokens_apart),
}
VALUES = parts.values({**parts.routed(), **SHARED})
TINY = {**parts.TINY_MIXTURE, "intermediate_size": 88, "shared_expert_intermediate_size": 72}
DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "qkv_bias": True,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    norm, dense, bias = parts.rms(hf), parts.gated(hf), hf.flag("qkv_bias")
    mixture = parts.mixture(
        hf,
        SoftmaxTopK(hf.flag("norm_topk_prob")),
        shared=dataclasses.replace(dense, intermediate_size=hf.whole("shared_expert_intermediate_size", least=0)),
        shared_gate=True,
        shared_first=True,
    )
    below = hf.whole("max_window_layers", least=0)
    windows = parts.windows(hf, [SLIDING if i % 2 == 0 and i < below else FULL for i in range(hf.count)])
    layers = [
        Layer("sequential", norm, parts.attention(hf, window=window, bias=bias), mlp)
        for window, mlp in zip(windows, parts.sparse(hf, dense, mixture), strict=True)
    ]
    return parts.transformer(hf, layers, norm)
