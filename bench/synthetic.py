"""Writes checkpoints with the shapes of real models and random weights, for measuring speed.

The weights are random but repeat every few million elements: their values do not matter to speed,
and a 1.7-billion-parameter folder is written in seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from helm.model.families import build_graph, parse_config

SHAPES = json.loads((Path(__file__).parent / "shapes.json").read_text())
BYTES = {"f32": 4, "f16": 2, "bf16": 2}
SAFETENSORS_DTYPE = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
TORCH_DTYPE = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
BLOCK = 1 << 22  # random elements, repeated to fill a tensor
MADE_OF_IT = ("model.gguf", "reference.npy")  # files that others add to a checkpoint's folder
WRITTEN_BY = "2"  # counts up when other bytes are written, so that no folder of before is taken


def tensor_shapes(config: dict) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors."""
    return build_graph(parse_config(config)).tensors.items()


def _encode(values: np.ndarray, dtype: str) -> bytes:
    """f32 values as little-endian bytes of `dtype` (bf16 by truncation)."""
    if dtype == "f16":
        return values.astype(np.float16).tobytes()
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.tobytes()


def write_weights(path: Path, config: dict, dtype: str) -> None:
    """One safetensors file, written tensor by tensor."""
    rng = np.random.default_rng(0)
    noise = _encode(rng.standard_normal(BLOCK, dtype=np.float32) * np.float32(0.03), dtype)
    ones = _encode(np.ones(BLOCK, dtype=np.float32), dtype)
    header: dict[str, dict] = {}
    offset = 0
    for name, shape in tensor_shapes(config):
        size = int(np.prod(shape)) * BYTES[dtype]
        header[name] = {
            "dtype": SAFETENSORS_DTYPE[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            source = ones if len(entry["shape"]) == 1 else noise
            whole, rest = divmod(end - begin, len(source))
            for _ in range(whole):
                file.write(source)
            file.write(source[:rest])


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level BPE of the asked size, so that start-up pays for a tokenizer of real size. But
    for single bytes, tokens are ASCII: a stream tells each as it comes, and none waits for the rest
    of a character."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    letters = [token for token in alphabet if token.isascii()]
    merges: list[list[str]] = []
    tokens = list(letters)
    for number in range(vocab_size - len(alphabet)):
        a, b = tokens[number // len(letters)], letters[number % len(letters)]
        vocab[a + b] = len(vocab)
        tokens.append(a + b)
        merges.append([a, b])
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }
    path.write_text(json.dumps(document))


def named_config(shape: str) -> tuple[str, dict]:
    """Name and config of a shape of shapes.json, or of the config.json at that path."""
    if shape in SHAPES:
        return shape, SHAPES[shape]
    path = Path(shape)
    if not path.is_file():
        raise SystemExit(
            f"[bench] no shape {shape!r}; expected a config.json or one of {', '.join(SHAPES)}"
        )
    config = json.loads(path.read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return path.resolve().parent.name, config


def make_checkpoint(shape: str, dtype: str, root: Path, layers: int | None = None) -> Path:
    """The folder of a checkpoint of `shape` in `dtype`, written unless it is already there. layers:
    so many of its blocks."""
    name, config = named_config(shape)
    if layers is not None:
        name, config = f"{name}-{layers}-layers", {**config, "num_hidden_layers": layers}
    config = {**config, "torch_dtype": TORCH_DTYPE[dtype], "eos_token_id": []}
    folder = root / f"{name}-{dtype}"
    done = folder / "complete"
    same = done.exists() and done.read_text() == WRITTEN_BY
    if same and json.loads((folder / "config.json").read_text()) == config:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (done, *(folder / made for made in MADE_OF_IT)):
        stale.unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_weights(folder / "model.safetensors", config, dtype)
    write_tokenizer(folder / "tokenizer.json", config["vocab_size"])
    done.write_text(WRITTEN_BY)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--dtype", choices=sorted(BYTES), default="bf16")
    parser.add_argument("--root", type=Path, default=Path("bench/out"))
    args = parser.parse_args()
    print(make_checkpoint(args.shape, args.dtype, args.root))


if __name__ == "__main__":
    main()
