"""What two papers on weights that visit publish, as pieces of the ring and as machines."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from helm.compiler.counts import CostedGraph
from helm.compiler.visits.ring import Piece
from helm.machine.profile import Profile, load_profile
from helm.model.families import build_graph, parse_config

GIB = 1 << 30
_FILE = Path(__file__).parents[1] / "data" / "published_policies.json"
TABLES: dict[str, Any] = json.loads(_FILE.read_text())
DISTRIBUTION, MEMORY = TABLES["workload_distribution"], TABLES["heterogeneous_memory"]
OPS: list[str] = DISTRIBUTION["ops"]
# GiB/s: two published with the table, NVDRAM's from the ratios of the table themselves.
LINKS = {"nvdram": 18.0, "cxl_fpga": 5.12, "cxl_asic": 28.0}
MEMORIES = ("nvdram", "cxl_fpga", "cxl_asic")  # as the columns of the table


@dataclasses.dataclass(frozen=True)
class Choices:
    """Every way to give the accelerator ops `first` to before `end`, and of these read those of
    `disk` from a disk; an element each of the pieces' seconds."""

    first: np.ndarray
    end: np.ndarray
    disk: np.ndarray  # [ways, ops]

    def there(self, op: int) -> np.ndarray:
        return (self.first <= op) & (op < self.end)


def choices(disk: bool = False) -> Choices:
    count, found = len(OPS), []
    weights = [i for i, size in enumerate(DISTRIBUTION["fig8a_compressed"]["storage_to_device"])
               if size > 0]  # fmt: skip
    for first, end in itertools.combinations_with_replacement(range(count + 1), 2):
        inside = [op for op in weights if first <= op < end] if disk else []
        for some in range(len(inside) + 1):
            for chosen in itertools.combinations(inside, some):
                found.append((first, end, [op in chosen for op in range(count)]))
    first, end, chosen = zip(*found, strict=True)
    return Choices(np.array(first), np.array(end), np.array(chosen))


def layer(
    ways: Choices, cpu: list[float], h2d: list[float], gpu: list[float] | None = None,
    unpack: list[float] | None = None, batches: int = 1,
) -> list[Piece]:  # fmt: skip
    """A layer of OPT-30B, op by op, in ms. batches: that take turns; weights come for the first."""
    table, pieces, kv = DISTRIBUTION["fig8a_compressed"], list[Piece](), {4, 6}
    for batch, op in itertools.product(range(batches), range(len(OPS))):
        own, disk = ways.there(op), ways.disk[:, op]
        comes = own & ~disk if batch == 0 or op in kv else np.zeros_like(own)
        pieces.append(
            Piece(
                OPS[op],
                accelerator_s=np.where(own, 0.0 if gpu is None else gpu[op], 0.0),
                cpu_s=np.where(own, 0.0, cpu[op]),
                up_s=np.where(comes, h2d[op], 0.0),
                unpack_s=np.where(comes, 0.0 if unpack is None else unpack[op], 0.0),
                disk_s=np.where(own & disk, table["storage_to_device"][op], 0.0),
            )
        )
    return pieces


@functools.cache
def opt_175b() -> CostedGraph:
    """In 4 bits with a scale of 16 bits for 32 weights, which take what FlexGen's take with two
    for 64."""
    config = parse_config(
        {
            "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 12288,
            "ffn_dim": 49152, "num_attention_heads": 96, "num_hidden_layers": 96,
            "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 12288,
            "do_layer_norm_before": True, "activation_function": "relu", "torch_dtype": "float16",
        }
    )  # fmt: skip
    graph = build_graph(config)
    formats = {
        name: "f32" if len(shape) == 1 else "c4.s32" for name, shape in graph.tensors.items()
    }
    return CostedGraph(graph, formats, "f16")


def server(memory: str) -> Profile:
    """A100 of 40 GB whose kernels take what the paper's take for a layer in decode, with host
    memory that its copies read so fast."""
    base = load_profile("thesis-3090")
    assert base.accelerator is not None
    assert base.link is not None
    _, mlp_ms = (MEMORY["decode_compute_ms"][half] for half in ("attention", "mlp"))
    reads = 49152 * 12288 * 2 * 0.5625 / (mlp_ms * 1e-3)  # bytes/s of an mlp's matrices
    own = base.accelerator
    rates = dict.fromkeys(own.matvec_bytes_per_s, reads)
    rate = LINKS[memory] * GIB
    return dataclasses.replace(
        base,
        cpu=dataclasses.replace(base.cpu, memory_bytes=1024 * GIB),
        accelerator=dataclasses.replace(
            own, memory_bytes=40 * GIB, matvec_bytes_per_s=rates, op_s=0.0, step_s=0.0
        ),
        link=dataclasses.replace(
            base.link, to_accelerator_bytes_per_s=rate, latency_s=0.0
        ),
    )  # fmt: skip
