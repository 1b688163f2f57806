"""From what compare.py measured to figures and bars: pure functions of its JSON, nothing is run.

A model of that JSON has `shape`, `dtype`, `config`, `engines`, `scenarios`, `left_out`, `rounds`,
and of a GGUF file in blocks `weight_bytes`, what a decode step reads of its matrices.
A round is a list of processes: `engine`, `load_s`, `first_token_s`, `details`, `deviation`, `runs`,
and perhaps `weight_bytes`, what it reads of weights in a decode step.
A run has its `scenario`'s name, `seconds` of all its steps, `typical_seconds` if in each part all
took as long as the median one (not in files of before 2026-11-25), `ops` of `seconds`, the typical
`alone_seconds` of the same steps of one sequence in turn with them (0: not measured),
`peak_rss_bytes` and the `ceilings` before, between and after its parts, which have as many steps
each, give or take one.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from helm.model.families import build_graph, parse_config
from helm.model.mixture_ops import Experts
from scenarios import Scenario, family, variant
from synthetic import BYTES

# Names of figures, in the order in which tables show them.
RATE = "tok/s"
MEMORY = "GB/s"
OF_READ = "of read ceiling"
AS_STORED = "of reading as stored"
FLOPS = "GFLOP/s"
OF_PEAK = "of f32 peak"
PRODUCTS = "products of f32 peak"
OTHER_OPS = "other ops"
OF_ROOFLINE = "of roofline"
TIMES = "times one sequence"

# HELM's tiers that multiply bf16 weights in bf16.
BF16_TIERS = ("avx512bf16", "amx")


def _matrices(config: dict) -> dict[str, float]:
    """Elements of the blocks' matrices by name; of experts, those that a token has."""
    graph = build_graph(parse_config(config))
    shares = {
        name: op.chosen / op.experts
        for op in graph.ops()
        if isinstance(op, Experts)
        for name in op.matrices()
    }
    return {
        name: shape[0] * shape[1] * shares.get(name, 1)
        for name, shape in graph.tensors.items()
        if name.startswith("model.layers.") and len(shape) == 2
    }


def matrix_elements(config: dict) -> tuple[float, int]:
    """Elements of the blocks' matrices that a token needs, and of the head."""
    return sum(_matrices(config).values()), config["vocab_size"] * config["hidden_size"]


def step_bytes(
    config: dict, dtype: str, scenario: Scenario, weight_bytes: float | None = None
) -> float:
    """What a decode step must read: every block matrix and the head once, K and V of every
    sequence; all in the checkpoint's dtype. weight_bytes: of matrices and head, where an engine
    holds them otherwise."""
    if weight_bytes is None:
        weight_bytes = sum(matrix_elements(config)) * BYTES[dtype]
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    kv_bytes = BYTES.get(dtype, BYTES["f16"])  # beside blocks of a GGUF file: f16
    return weight_bytes + kv * scenario.mean_context * scenario.sequences * kv_bytes


def product_flops(config: dict, tokens: int) -> float:
    """Of a prompt with every block matrix up to the last attention; of its last token, whose logits
    alone are asked for, with what lies behind it."""
    blocks, head = matrix_elements(config)
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    behind = sum(
        elements
        for name, elements in _matrices(config).items()
        if name.startswith((f"{last}self_attn.o_proj.", f"{last}mlp."))
    )
    return 2.0 * ((blocks - behind) * tokens + behind + head)


def attention_flops(config: dict, tokens: int) -> float:
    """Of a prompt's queries with the keys and values up to their own position."""
    pairs = tokens * (tokens + 1) / 2
    heads = config["num_attention_heads"] * config["head_dim"]
    return 4.0 * config["num_hidden_layers"] * heads * pairs


def around(run: dict, ceiling: str) -> float:
    """A ceiling of a run: the rate at which work goes that reaches in each part, all of them equal,
    the mean of the probes before and after it."""
    pairs = itertools.pairwise(probe[ceiling] for probe in run["ceilings"])
    return statistics.harmonic_mean([statistics.mean(pair) for pair in pairs])


def run_figures(
    run: dict,
    scenario: Scenario,
    config: dict,
    dtype: str,
    weight_bytes: float | None = None,
    in_f32: bool = True,
    stored_bytes: float | None = None,
) -> dict[str, float]:
    """Of one run; shares are of the ceilings around its parts. weight_bytes: see
    `step_bytes`; stored_bytes: the same of the file, where its matrices are no elements of dtype.
    in_f32: whether products are in f32, which the peak then bounds. How many experts several
    sequences share is not known, so steps of a mixture have no bytes then."""
    ops, peak = run["ops"], around(run, "fma_flops")
    seconds = run.get("typical_seconds", run["seconds"])
    found = {RATE: scenario.tokens / seconds}
    if scenario.kind == "prefill":
        products = product_flops(config, scenario.tokens)
        flops = products + attention_flops(config, scenario.tokens)
        found[FLOPS] = flops / seconds / 1e9
        found[OF_PEAK] = flops / seconds / peak
        if in_f32:
            found[OF_ROOFLINE] = found[OF_PEAK]
        if ops:
            found[PRODUCTS] = products / _products_s(ops) / peak
    elif scenario.sequences == 1 or parse_config(config).mixture is None:
        steps_per_s, ceiling = scenario.steps / seconds, around(run, "read_bytes_per_s")
        read = weight_bytes if weight_bytes is not None else stored_bytes
        rate = step_bytes(config, dtype, scenario, read) * steps_per_s
        found[MEMORY] = rate / 1e9
        found[OF_READ] = rate / ceiling
        as_stored = step_bytes(config, dtype, scenario, stored_bytes)
        found[AS_STORED] = as_stored * steps_per_s / ceiling
        computed = 2.0 * sum(matrix_elements(config)) * scenario.sequences * steps_per_s / peak
        found[OF_ROOFLINE] = max(found[OF_READ], computed if in_f32 else 0.0)
    if run.get("alone_seconds"):
        found[TIMES] = scenario.sequences * run["alone_seconds"] / seconds
    if ops:
        found[OTHER_OPS] = 1 - (_products_s(ops) + ops["attention"]) / run["seconds"]
    return found


def _products_s(ops: dict[str, float]) -> float:
    return ops["linear"] + ops.get("experts", 0.0)


Figures = dict[tuple[str, str], dict[str, float]]  # (engine, scenario) -> figure -> value


def rounds_of(model: dict) -> list[Figures]:
    """Of each round."""
    scenarios = {fields["name"]: Scenario(**fields) for fields in model["scenarios"]}

    def of_run(process: dict, run: dict) -> dict[str, float]:
        scenario, read = scenarios[run["scenario"]], process.get("weight_bytes")
        in_bf16 = model["dtype"] == "bf16" and process["details"].get("isa") in BF16_TIERS
        in_f32 = model["dtype"] in BYTES and not in_bf16
        stored = model.get("weight_bytes")
        return run_figures(run, scenario, model["config"], model["dtype"], read, in_f32, stored)

    return [
        {(p["engine"], run["scenario"]): of_run(p, run) for p in processes for run in p["runs"]}
        for processes in model["rounds"]
    ]


def series(rounds: Sequence[Figures], engine: str, scenario: str, figure: str) -> list[float]:
    """One value for each round that has it."""
    cells = (found.get((engine, scenario), {}).get(figure) for found in rounds)
    return [value for value in cells if value is not None]


def engines_of(model: dict) -> list[str]:
    """In the order in which they were asked for."""
    return [e for e in model["engines"] if any(p["engine"] == e for p in _processes(model))]


def tier_of(model: dict) -> str:
    """The isa that HELM chose itself; "" where it was not measured."""
    tiers = [p["details"]["isa"] for p in _processes(model) if p["engine"] == "helm"]
    return tiers[0] if tiers else ""


def reads_compressed(model: dict) -> bool:
    """Whether an engine reads fewer bytes of weights than the checkpoint has."""
    if model["dtype"] not in BYTES:
        return False
    stored = stored_weights(model)
    return any((p.get("weight_bytes") or stored) < stored for p in _processes(model))


def stored_weights(model: dict) -> float:
    """Bytes of the matrices that a step reads, as the file has them."""
    if model.get("weight_bytes"):
        return float(model["weight_bytes"])
    return sum(matrix_elements(model["config"])) * BYTES[model["dtype"]]


def scenarios_of(model: dict) -> list[Scenario]:
    """That some engine has measured, in the order in which they were asked for."""
    found = {run["scenario"] for p in _processes(model) for run in p["runs"]}
    return [Scenario(**fields) for fields in model["scenarios"] if fields["name"] in found]


def _processes(model: dict) -> Iterator[dict]:
    for processes in model["rounds"]:
        yield from processes


@dataclass(frozen=True)
class Bar:
    """A goal of a ratio of one round. value: raises KeyError where the round lacks a part."""

    text: str
    engine: str
    goal: float
    value: Callable[[Figures], float]
    at_most: bool = False
    percent: bool = True
    shapes: tuple[str, ...] | None = None  # None: all
    scenario: str = ""  # of a ratio: whose roofline limits it
    of_limit: float = 0.0  # share of what the ceilings allow that is enough; 0: the goal alone

    def wanted(self, limits: Sequence[float]) -> float:
        """The goal or, where `of_limit` of what the ceilings allow is less, that."""
        if not limits or not self.of_limit:
            return self.goal
        return min(self.goal, self.of_limit * statistics.median(limits))

    def met(self, values: Sequence[float], limits: Sequence[float] = ()) -> bool:
        """Whether the median is where it should be."""
        typical = statistics.median(values)
        return typical < self.goal if self.at_most else typical >= self.wanted(limits)


def _share(engine: str, scenario: str, figure: str) -> Callable[[Figures], float]:
    return lambda found: found[engine, scenario][figure]


def _over(engine: str, scenario: str, peer: str) -> Callable[[Figures], float]:
    """Tokens/s over the peer's."""
    return lambda found: found[engine, scenario][RATE] / found[peer, scenario][RATE]


def _over_best(engine: str, scenario: str, peers: str) -> Callable[[Figures], float]:
    """Tokens/s over those of the fastest setting of a family of peers."""

    def ratio(found: Figures) -> float:
        names = [name for name, measured in found if measured == scenario and family(name) == peers]
        if not names:
            raise KeyError(peers)
        return found[engine, scenario][RATE] / max(found[name, scenario][RATE] for name in names)

    return ratio


OVER_LLAMA = {"Qwen2.5-Coder-1.5B-Q4_K_M": 1.15}  # decode; of other shapes 1.4
# Of a mixture, decode where llama.cpp reads at most LLAMA_READS of the ceiling, and where more.
OVER_LLAMA_MIXTURE, LLAMA_READS = (1.2, 1.05), 0.65


def bars_of_blocks(model: dict) -> list[Bar]:
    """Goals with weights in blocks of a GGUF file."""
    decode = _over_best("helm", "decode", "llama.cpp")
    prompt = _over_best("helm", "prefill-512", "llama.cpp")
    goal, share, read = OVER_LLAMA.get(model["shape"], 1.4), 0.85, 0.85
    if parse_config(model["config"]).mixture is not None:
        goal, share, read = OVER_LLAMA_MIXTURE[_llama_reads(model) > LLAMA_READS], 0.0, 0.8
    return [
        Bar("decode over llama.cpp, its best setting", "helm", goal, decode,
            percent=False, scenario="decode", of_limit=share),
        Bar("prefill of 512 over llama.cpp, its best setting", "helm", 1.5, prompt, percent=False,
            scenario="prefill-512"),
        Bar("decode, of the read ceiling", "helm", read, _share("helm", "decode", OF_READ)),
    ]  # fmt: skip


def _llama_reads(model: dict) -> float:
    """The share of the read ceiling at which llama.cpp's best setting decodes, a median; 0 where
    it was not measured."""
    best = [
        max(of[OF_READ] for of in own)
        for found in rounds_of(model)
        if (own := [f for (e, s), f in found.items() if (family(e), s) == ("llama.cpp", "decode")])
    ]
    return statistics.median(best) if best else 0.0


def bars(engines: Sequence[str], tier: str = "", compressed: bool = False) -> list[Bar]:
    """All of them, where HELM chooses `tier` itself; those of prefill and against peers once for
    each of its tiers above AVX2, since some round activations, as some peers do, and some do not.
    compressed: goals of what is read are also set to tokens/s, as an engine would make them that
    reads the checkpoint's own bytes at that share of the ceiling.
    """

    def ratio(
        text: str, engine: str, goal: float, scenario: str, of: Callable[..., Any], to: str
    ) -> Bar:
        value = of(engine, scenario, to)
        return Bar(text, engine, goal, value, percent=False, scenario=scenario)

    tiers = [e for e in engines if family(e) == "helm" and variant(e) not in ("avx2", "scalar")]
    avx2 = "helm" if tier == "avx2" else "helm:avx2"
    bases = [(OF_READ, "of the read ceiling")]
    if compressed:
        bases.append((AS_STORED, "of reading the checkpoint's bytes"))

    def reading(what: str, engine: str, scenario: str, goal: float) -> list[Bar]:
        return [
            Bar(f"{what}, {base}", engine, goal, _share(engine, scenario, figure))
            for figure, base in bases
        ]

    found = [] if tier == "avx2" else reading("decode", "helm", "decode", 0.93)
    found += reading("decode on AVX2 alone", avx2, "decode", 0.88)
    for engine in tiers:
        found += [
            ratio("decode over llama.cpp, its better setting", engine, 1.3,
                "decode", _over_best, "llama.cpp"),
            Bar("prefill of 512, products, of the f32 peak", engine, 0.85,
                _share(engine, "prefill-512", PRODUCTS)),
            ratio("prefill of 512 over llama.cpp, its better setting", engine, 1.4,
                "prefill-512", _over_best, "llama.cpp"),
            ratio("prefill of 512 over transformers in f32", engine, 1.0,
                "prefill-512", _over, "transformers:f32"),
        ]  # fmt: skip
    return [
        *found,
        Bar("prefill of 4,096 with attention, of the f32 peak", "helm", 0.75,
            _share("helm", "prefill-4096", OF_PEAK)),
        ratio("4 sequences over one", "helm", 3.6, "decode-x4", _share, TIMES),
        ratio("8 sequences over one", "helm", 6.0, "decode-x8", _share, TIMES),
        *reading("decode at 4,096", "helm", "decode@4096", 0.85),
        *reading("decode at 32,768", "helm", "decode@32768", 0.85),
        ratio("decode at 4,096 over llama.cpp as it comes", "helm", 3.0,
            "decode@4096", _over, "llama.cpp"),
        ratio("decode at 4,096 over llama.cpp, its better setting", "helm", 1.3,
            "decode@4096", _over_best, "llama.cpp"),
        Bar("all but products and attention, of a decode step", "helm", 0.03,
            _share("helm", "decode", OTHER_OPS), at_most=True, shapes=("qwen3-0.6b",)),
    ]  # fmt: skip


def bar_values(bar: Bar, rounds: Sequence[Figures]) -> list[float]:
    """One for each round that has all parts."""
    values = []
    for found in rounds:
        try:
            values.append(bar.value(found))
        except KeyError:
            continue
    return values


def bar_limits(bar: Bar, rounds: Sequence[Figures]) -> list[float]:
    """What a ratio's value would be at the roofline: reading at the ceiling or computing at the
    peak, whichever takes longer, beside the same peer. Empty of shares, which are of it already."""
    values = []
    for found in rounds:
        try:
            values.append(bar.value(found) / found[bar.engine, bar.scenario][OF_ROOFLINE])
        except KeyError:
            continue
    return values


def process_figures(model: dict, engine: str) -> dict[str, list[Any]]:
    """Of starting an engine, by round. The resident size is that after its first scenario."""
    weights = stored_weights(model)
    own = [p for p in _processes(model) if p["engine"] == engine and p["runs"]]
    return {
        "start to loaded s": [p["load_s"] for p in own],
        "start to first token s": [p["first_token_s"] for p in own],
        "peak RSS / weights": [p["runs"][0]["peak_rss_bytes"] / weights for p in own],
        "logits off by": [p["deviation"] for p in own if p["deviation"] is not None],
    }
