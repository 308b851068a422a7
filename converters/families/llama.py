"""Llama 1 to 3.3, SmolLM2, TinyLlama and the many named so:  h = x + attention(rms(x));  out = h + mlp(rms(h))

A matrix each for queries, keys, values, gate and up; biases only where `attention_bias` or `mlp_bias` says so. Llama
3.1 and later stretch the slow rotary frequencies.
Release: https://huggingface.co/meta-llama/Llama-3.1-8B
"""

from converters import parts
from converters.hf_config import ConfigReader
from transformer_std.config import Layer, TransformerConfig

ARCHITECTURES = ("LlamaForCausalLM",)
WEIGHTS, VALUES, TINY = parts.weights(), parts.values(), parts.TINY
DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def config(hf: ConfigReader) -> TransformerConfig:
    hf.ignore("pretraining_tp", because="how the release split its products among devices, not what they are")
    hf.ignore("is_llama_config", because="of the library that trained it")
    norm = parts.rms(hf)
    return parts.transformer(hf, [Layer("sequential", norm, parts.attention(hf), parts.gated(hf))] * hf.count, norm)
