"""A checkpoint of more files than a process may open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from helm.model.hub import bundled_model

LAYERS = 222


def many_shards(folder: Path) -> None:
    """A random model of 2,000 tensors, each in a file of its own."""
    config = json.loads((bundled_model() / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "hidden_size": 16, "intermediate_size": 24}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    config |= {"head_dim": 8, "tie_word_embeddings": True}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}self_attn.{p}_proj.weight": (8, 16) for p in "kv"}
        shapes |= {f"{name}self_attn.{p}_proj.weight": (16, 16) for p in "qo"}
        shapes |= {f"{name}mlp.{p}_proj.weight": (24, 16) for p in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (16, 24)
        shapes |= {f"{name}{n}_layernorm.weight": (16,) for n in ("input", "post_attention")}
    random = numpy.random.default_rng(1)
    weight_map = {}
    for i, (name, shape) in enumerate(shapes.items()):
        tensor = random.normal(0, 0.1, shape).astype(numpy.float32)
        weight_map[name] = f"shard-{i:04}.safetensors"
        save_file({name: tensor}, folder / weight_map[name])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(weight_map) == 2000


FEW = """
import resource, sys
import helm
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
tokens = []
for weights in ("copied", "mapped"):
    with helm.LLM(sys.argv[1], context=64, weights=weights, threads=2) as llm:
        tokens.append(llm.generate([1, 5, 7], max_tokens=5, ignore_eos=True).tokens)
assert tokens[0] == tokens[1]
print(len(tokens[0]))
"""


def test_a_checkpoint_of_2000_shards_takes_few_descriptors(tmp_path: Path) -> None:
    many_shards(tmp_path)
    program = [sys.executable, "-c", FEW, str(tmp_path)]
    loaded = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert (loaded.returncode, loaded.stdout) == (0, "5\n"), loaded.stderr
