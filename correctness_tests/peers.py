"""Hugging Face's Llama in the shape of a model of ours, for what compares the two."""

from __future__ import annotations

from typing import Any

from tinyllama.config import ModelConfig


def hugging_face_llama(shape: ModelConfig) -> Any:
    """`LlamaForCausalLM` with materialised attention and a tied embedding, on the CPU.

    Needs the extra ``peers``; skip with a reason where it is not installed.
    """
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            rms_norm_eps=shape.norm_eps,
            rope_theta=shape.rope_theta,
            tie_word_embeddings=True,
            attn_implementation="eager",
            use_cache=False,
        )
    )
