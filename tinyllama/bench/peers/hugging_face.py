"""Hugging Face's Llama in the shape of a model of ours, for what compares the two."""

from typing import Any

import torch

from tinyllama.model.config import ModelConfig

_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "w_q",
    "self_attn.k_proj": "w_k",
    "self_attn.v_proj": "w_v",
    "self_attn.o_proj": "w_o",
    "mlp.gate_proj": "w_gate",
    "mlp.up_proj": "w_up",
    "mlp.down_proj": "w_down",
}


def hugging_face_names(shape: ModelConfig) -> dict[str, str]:
    """Their name of each parameter -> ours."""
    pairs = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm"}
    for layer in range(shape.num_layers):
        for theirs, ours in _NAMES.items():
            pairs[f"model.layers.{layer}.{theirs}.weight"] = f"layers.{layer}.{ours}"
    return pairs


def _row_order(shape: ModelConfig, name: str) -> torch.Tensor | None:
    """Which of our rows each of theirs is; None where the order is the same.

    They rotate the halves of a head where this model rotates consecutive pairs, so the rows
    of the query and key projections are permuted.
    """
    heads = {"w_q": shape.num_heads, "w_k": shape.num_kv_heads}.get(name.rsplit(".", 1)[-1])
    if heads is None:
        return None
    width = shape.head_dim
    halves = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))
    return torch.cat([halves + head * width for head in range(heads)])


def as_hugging_face(shape: ModelConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of ours, or its gradient, in their order of rows."""
    order = _row_order(shape, name)
    return tensor if order is None else tensor[order.to(tensor.device)]


def as_ours(shape: ModelConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of theirs, or its gradient, in our order of rows; ``name`` is ours."""
    order = _row_order(shape, name)
    return tensor if order is None else tensor[order.argsort().to(tensor.device)]


def hugging_face_llama(shape: ModelConfig, attention: str = "eager") -> Any:
    """`LlamaForCausalLM` with a tied embedding, on the CPU.

    attention: "eager" materialises the scores, "sdpa" is fused. Needs the extra ``peers``;
    skip with a reason where it is not installed.
    """
    import transformers

    inherited: dict[str, Any] = {"rope_theta": shape.rope_theta, "attn_implementation": attention}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            rms_norm_eps=shape.norm_eps,
            tie_word_embeddings=True,
            use_cache=False,
            **inherited,
        )
    )
