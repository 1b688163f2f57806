"""Safetensors files: headers, offsets, data; folders of shards with an index, and folders that HELM
saved."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import safetensors

import helm
from fuzz import models, mutate
from fuzz.kind import Kind, sensible, tokens_are_sensible
from helm.base.formats import FORMAT_NAMES, PACKED_POLICIES
from helm.model.checkpoint.safetensors import read_checkpoint

ARCHITECTURES = tuple(sorted(models.FAMILIES))


def generates(folder: Path, random: Random) -> None:
    """A folder that loads also generates, whatever its weights are."""
    weights = random.choice(("copied", "mapped", "auto", "auto"))
    with models.load(folder, weights=weights) as llm:
        prompt = [random.randrange(llm.vocab_size) for _ in range(min(5, llm.context))]
        completion = llm.generate(prompt, max_tokens=3)
        tokens_are_sensible(completion.tokens, 3, llm.vocab_size)
        rows = llm.logits(prompt)
        sensible(rows.shape == (len(prompt), llm.vocab_size), f"logits of shape {rows.shape}")


def as_the_library(path: Path) -> None:
    """What HELM reads in a file, the format's own library reads too."""
    own = read_checkpoint(path.parent)
    try:
        with safetensors.safe_open(path, "numpy") as found:
            names = set(found.keys())
            shapes = {name: tuple(found.get_slice(name).get_shape()) for name in names}
            dtypes = {name: found.get_slice(name).get_dtype() for name in names}
    except safetensors.SafetensorError as error:
        sensible(False, f"safetensors refuses what HELM reads: {error}")
    sensible(names == set(own), f"tensors {sorted(names ^ set(own))} are in one reading only")
    for name, info in own.items():
        sensible(shapes[name] == info.shape, f"{name} has shape {shapes[name]} or {info.shape}")
        stored = info.stored.upper()
        sensible(dtypes[name] == stored, f"{name} is {dtypes[name]} or {stored}")


def rearranged(random: Random, weights: dict[str, Any]) -> dict[str, Any]:
    """Whole files of which some tensors are missing, new, of other shape or otherwise named."""
    found = dict(weights)
    one, other = random.sample(list(found), 2)
    pick = random.randrange(6)
    if pick == 0:
        del found[one]
    elif pick == 1:
        found[random.choice(("model.rotary_emb.inv_freq", "score.weight", "\U0001f600", ""))] = (
            found[one]
        )
    elif pick == 2:
        found[one] = found[one].reshape(random.choice(((-1,), (1, -1), (-1, 1), (1, -1, 1))))
    elif pick == 3:
        prefix = random.choice(("module.", "_orig_mod.", "model.model.", "x."))
        found = {prefix + name: array for name, array in found.items()}
    elif pick == 4:
        found["lm_head.weight"] = found[other]
    return dict(sorted(found.items(), key=lambda _: random.random()))


class Checkpoint(Kind):
    """One file, in its place among the files of a model."""

    name = "checkpoint"
    inputs = 2600

    def __init__(self, folder: Path) -> None:
        configs = [models.config_of(architecture) for architecture in ARCHITECTURES]
        self._models = [(config, models.weights_of(config)) for config in configs]

    def run(self, random: Random, folder: Path) -> None:
        config, weights = random.choice(self._models)
        (folder / "config.json").write_text(json.dumps(config))
        path = folder / "model.safetensors"
        if random.random() < 0.3:
            weights = rearranged(random, weights)
        header, data = models.safetensors(weights, random.choice(("F32", "F16", "BF16")))
        path.write_bytes(self._file(random, header, data))
        if random.random() < 0.1:
            mutate.file(random, path)
        as_the_library(path)
        generates(folder, random)

    def _file(self, random: Random, header: dict[str, Any], data: bytes) -> bytes:
        pick = random.random()
        if pick < 0.1:  # numbers that no model holds
            special = random.choice((0x7FC0, 0x7F80, 0xFF80, 0x0001, 0x7F7F)).to_bytes(2, "little")
            place = 2 * random.randrange(len(data) // 2 - 64)
            data = data[:place] + special * 32 + data[place + 64 :]
            return models.file_of(json.dumps(header).encode(), data)
        if pick < 0.2:
            return mutate.octets(random, models.file_of(json.dumps(header).encode(), data))
        if pick < 0.3:  # in another order, with names of two exchanged
            names = [name for name in header if name != "__metadata__"]
            one, other = random.sample(names, 2)
            header = {**header, one: header[other], other: header[one]}
        elif pick < 0.35:
            one, other = random.sample([name for name in header if name != "__metadata__"], 2)
            header = {**header, one: {**header[one], "data_offsets": header[other]["data_offsets"]}}
        elif pick < 0.5:  # bits that mean other numbers
            own = header[random.choice([name for name in header if name != "__metadata__"])]
            own["dtype"] = {"F32": "I32", "F16": "BF16", "BF16": "F16"}[own["dtype"]]
        elif pick < 0.9:
            header = mutate.json_value(random, header)
        return models.file_of(mutate.dumped(random, header), data)


class Shards(Kind):
    """Several files and their index."""

    name = "shards"
    inputs = 1500

    def __init__(self, folder: Path) -> None:
        self._folders = []
        for architecture in ARCHITECTURES:
            self._folders.append(folder / architecture)
            models.write_model(self._folders[-1], architecture, shards=3)

    def run(self, random: Random, folder: Path) -> None:
        for path in random.choice(self._folders).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        index = folder / "model.safetensors.index.json"
        shards = sorted(folder.glob("*.safetensors"))
        for _ in range(random.choice((1, 1, 2))):
            self._change(random, index, shards)
        generates(folder, random)

    def _change(self, random: Random, index: Path, shards: list[Path]) -> None:
        pick = random.random()
        shard, other = random.sample(shards, 2)
        if pick < 0.15:
            mutate.file(random, random.choice((index, *shards)))
        elif pick < 0.25 and _plain(shard) and _plain(other):
            first, second = shard.read_bytes(), other.read_bytes()
            shard.write_bytes(second)
            if random.random() < 0.5:
                other.write_bytes(first)
        elif pick < 0.35 and _plain(shard):
            shard.write_bytes(mutate.octets(random, shard.read_bytes()))
        elif _plain(index):
            document = _parsed(index)
            map_ = document.get("weight_map") if isinstance(document, dict) else None
            if isinstance(map_, dict) and map_ and random.random() < 0.6:
                name = random.choice(list(map_))
                places = ("../x.safetensors", "/etc/passwd", "", ".", "a/b", shard.name, "absent")
                map_[name] = random.choice(places)
            else:
                document = mutate.json_value(random, document)
            index.write_bytes(mutate.dumped(random, document))


class Quantized(Kind):
    """A folder that HELM saved in 8 or 4 bits: its header, what that says of matrices, their
    bytes."""

    name = "quantized"
    inputs = 1500

    def __init__(self, folder: Path) -> None:
        self._folders = []
        for number, architecture in enumerate(ARCHITECTURES):
            wide = {"intermediate_size": 4160, "ffn_dim": 4160}  # enough for 4 bits
            models.write_model(folder / architecture, architecture, "BF16", changes=wide)
            to = PACKED_POLICIES[number % 2]
            self._folders.append(folder / f"{architecture}-{to}")
            helm.quantize(folder / architecture, self._folders[-1], to=to, threads=1)

    def run(self, random: Random, folder: Path) -> None:
        for path in random.choice(self._folders).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        path = folder / "model.safetensors"
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header, own = json.loads(data[8:begin]), data[begin:]
        pick = random.random()
        if pick < 0.2:
            path.write_bytes(mutate.octets(random, data))
        elif pick < 0.3:
            mutate.file(random, path)
        elif pick < 0.5:  # codes and scales of any kind
            place = random.randrange(len(own) - 64)
            path.write_bytes(data[:begin] + own[:place] + random.randbytes(64) + own[place + 64 :])
        else:
            path.write_bytes(_padded(self._header(random, header), own))
        generates(folder, random)

    def _header(self, random: Random, header: dict[str, Any]) -> bytes:
        pick, stated = random.random(), header["__metadata__"]
        if pick < 0.2:
            return mutate.dumped(random, mutate.json_value(random, header))
        if pick < 0.3:
            stated["helm.layout"] = random.choice(("0", "2", "10" * 9, "1.0", "", "-1", "\u0661"))
        elif pick < 0.4:
            del stated[random.choice(("helm.layout", "helm.matrices"))]
        else:
            matrices = json.loads(stated["helm.matrices"])
            one, other = random.sample(list(matrices), 2)
            if pick < 0.6:
                matrices[one], matrices[other] = matrices[other], matrices[one]
            elif pick < 0.7:
                matrices[one]["format"] = random.choice(FORMAT_NAMES)
            elif pick < 0.8:
                matrices[one]["shape"] = matrices[one]["shape"][::-1]
            else:
                matrices = mutate.json_value(random, matrices)
            stated["helm.matrices"] = json.dumps(matrices)
        return json.dumps(header).encode()


def _padded(header: bytes, data: bytes) -> bytes:
    """A file whose data begins at a page, as HELM has it."""
    return models.file_of(header + b" " * (-(8 + len(header)) % 4096), data)


def _plain(path: Path) -> bool:
    """Whether a file is one of the origin's, not what mutate.file puts in its place."""
    return path.is_file() and not path.is_symlink() and 0 < path.stat().st_size < 1 << 20


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {"weight_map": {}}
