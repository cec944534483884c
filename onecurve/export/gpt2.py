"""Our GPT as transformers' GPT2LMHeadModel: the same function under GPT-2's names, shapes and config.

GPT-2's layers beside attention are ours. It stores the matrices of a block transposed ("Conv1D": x @ W + b, W is
[in, out]), and its attention has biases, which are zero here.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onecurve.model import GPT

_OUTSIDE = {
    "embedding.token": "transformer.wte.weight",
    "embedding.position": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def gpt2_tensors(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """GPT-2's names and tensors, in our order. They are views of the model's own: a matrix of a block, seen transposed,
    is not contiguous. A tied head is not among them; GPT-2 ties its own."""
    for name, tensor in model.state_dict().items():
        if name in model.tied_uses:
            continue
        if name in _OUTSIDE:
            yield _OUTSIDE[name], tensor
            continue
        _, block, inner = name.split(".", 2)
        part, _, kind = inner.rpartition(".")
        if inner in _IN_BLOCK:  # a matrix of attention: no module of its own, no bias
            theirs = f"transformer.h.{block}.{_IN_BLOCK[inner]}"
            yield f"{theirs}.weight", tensor.t()
            yield f"{theirs}.bias", torch.zeros(len(tensor))
        else:
            yield f"transformer.h.{block}.{_IN_BLOCK[part]}.{kind}", tensor.t() if tensor.ndim == 2 else tensor


def gpt2_config(model: GPT, *, heads: int, dropout: float, end_of_document: int | None) -> dict[str, Any]:
    """The content of config.json. A document begins as it ends: `end_of_document` is both ids, or none is there."""
    vocab, width = model.embedding.token.shape
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_positions": model.context,
        "n_embd": width,
        "n_layer": len(model.blocks),
        "n_head": heads,
        "n_inner": None,
        "activation_function": "gelu",
        "layer_norm_epsilon": model.head.norm.eps,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "resid_pdrop": dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": bool(model.tied_uses),
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "dtype": "float32",
    }
