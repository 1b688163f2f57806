"""A model that says what a test wants: each of its words is always followed by the same one.

Its blocks add nothing, embeddings are one-hot, and the head's row of a word is the embedding of the
word before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

_WIDTH = 64
END = "<|end|>"
ANSWER = "<|assistant|>"


def scripted(
    folder: Path, answer: Sequence[str], opening: str = "", marks: Sequence[str] = ()
) -> Path:
    """answer: its words, none of them twice. opening: what the chat template puts after
    `<|assistant|>`, which the first word follows where it is empty. marks: words that are added
    tokens, though no special ones."""
    special = ["<unk>", END, ANSWER, "<|user|>"]
    words = list(dict.fromkeys([*special, *marks, *answer, "Hello"]))
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True) for word in special])
    backend.add_tokens([AddedToken(mark) for mark in marks])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> " + opening + "{% endif %}"
    )
    config = {"eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in _shapes(len(words))}
    tensors["model.embed_tokens.weight"] = np.eye(len(words), _WIDTH, dtype=np.float32)
    for name in tensors:
        if "norm" in name:
            tensors[name] = np.ones(_WIDTH, np.float32)
    for word, following in zip([ANSWER, *answer], [*answer, END], strict=True):
        tensors["lm_head.weight"][words.index(following), words.index(word)] = 1
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(len(words), words.index(END))))
    return folder


def _config(vocabulary: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary, "eos_token_id": end, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip


def _shapes(vocabulary: int) -> list[tuple[str, tuple[int, ...]]]:
    block, square = "model.layers.0", (_WIDTH, _WIDTH)
    matrices = [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    ]
    return [
        ("lm_head.weight", (vocabulary, _WIDTH)),
        ("model.norm.weight", (_WIDTH,)),
        *((f"{block}.{name}.weight", (_WIDTH,))
          for name in ("input_layernorm", "post_attention_layernorm")),
        *((f"{block}.{name}.weight", square) for name in matrices),
    ]  # fmt: skip
