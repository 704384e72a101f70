"""A Llama checkpoint as a GGUF file: the weights and the shape, and no tokenizer, since we talk in ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bench.peers.interface import PeerAbsentError


def write_gguf(model: str, file: Path) -> None:
    """Write `model` in float32. Raises ImportError without gguf, PeerAbsentError for other architectures."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from paceline.engine.checkpoint import check_weights

    config: Any = AutoConfig.from_pretrained(model)
    _check(config)
    check_weights(model, config)
    load: Any = AutoModelForCausalLM.from_pretrained
    state = load(model, dtype=torch.float32, use_safetensors=True).state_dict()
    writer: Any = gguf.GGUFWriter(str(file), "llama")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            data = _interleaved(data, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(config: Any) -> None:
    if config.model_type != "llama":
        raise PeerAbsentError(f"only Llama checkpoints are written as GGUF here, not {config.model_type}")
    if config.rope_parameters["rope_type"] != "default" or config.attention_bias or config.mlp_bias:
        raise PeerAbsentError("only Llama checkpoints of the plain shape are written as GGUF here")


def _interleaved(weight: Any, heads: int) -> Any:
    """Rows of a projection as llama.cpp rotates them: pairs side by side, not halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
