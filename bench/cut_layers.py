"""Measures plans with cut layers beside the best of whole layers, on the same devices.

Engines hold the same random weights and the same accelerator memory, a share of what the weights
take. Several sequences may take turns on the devices in two groups, which the best of whole layers
does where it gains; one that keeps them together is measured, too. Round by round each decodes in
turn, with the host's memory read by one thread and by two in the same rounds, and the arithmetic of
two probed. What two threads read and multiply bounds a step from below, and so the gain from above.
First of all the best of both must give the same greedy tokens, but for the share that roundings
change, which is printed.

    python bench/cut_layers.py --device sim:threads=1 --shape qwen3-0.6b --dtype f16 --share 0.5 \
        --threads 1 --batch 1 8 --json out.json

On a simulated accelerator its threads and the CPU's should lie on cores of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

from figures import matrix_elements
from helm import _helm
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import Space
from helm.compiler.solve import Study, solve
from helm.machine.devices import open_accelerator
from helm.machine.profile import Profile
from helm.machine.rates import ACCELERATOR_RESERVE_BYTES
from helm.machine.resources import memory_available
from helm.model.config import ModelConfig
from helm.model.families import build_graph, parse_config
from helm.plan.records import Workload
from partitioned import PROBE_BYTES, PROBE_S, profile_of, prompt_of, shape_of
from random_weights import random_weights
from synthetic import BYTES, SHAPES, TORCH_DTYPE

POLICIES = ("layer-partition", "together", "cut")  # together: whole layers, one group


def generate(engine: Any, requests: list[Any]) -> tuple[list[int], list[float]]:
    """The tokens of all requests, and the seconds of each step of all: two groups give the tokens
    of one group at a time."""
    generation = _helm.Generation(engine, requests)
    tokens, steps = [], []
    begin = time.perf_counter()
    while not generation.done:
        tokens += [token.id for token in generation.advance(0.0)]
        if len(tokens) >= len(requests) * (len(steps) + 1):
            now = time.perf_counter()
            steps.append(now - begin)
            begin = now
    return tokens, steps


class Engine:
    """One policy's plan, loaded."""

    def __init__(self, study: Study, tensors: dict[str, Any], args: Any, batch: int) -> None:
        self.study, self.args = study, args
        plan = study.plan
        names = {tensor.whole for tensor in plan.tensors}
        bound = {name: tensors[name] for name in names}
        self.engine = _helm.Engine(plan.to_json(), "", bound, device=args.device)
        self.prompt = prompt_of(args.context, plan.model.vocab_size)
        self.sequences = [self.engine.open(plan.limits.context) for _ in range(batch)]

    def requests(self, cached: int) -> list[Any]:
        return [
            _helm.Request(
                prompt=[*self.prompt[: self.args.context - i], 1], sequence=sequence,
                cached=cached and self.args.context - i, max_tokens=self.args.tokens,
            )
            for i, sequence in enumerate(self.sequences)
        ]  # fmt: skip

    def prefill(self) -> None:
        for sequence in self.sequences:
            self.engine.truncate(sequence, 0)
        generate(self.engine, self.requests(0))

    def decode(self) -> tuple[list[int], float]:
        """The tokens, and seconds of a step of all sequences."""
        for i, sequence in enumerate(self.sequences):
            self.engine.truncate(sequence, self.args.context - i)
        found, steps = generate(self.engine, self.requests(1))
        return found, statistics.median(steps)


def study_of(
    config: ModelConfig, infos: Any, profile: Profile, policy: str, batch: int, args: Any
) -> Study:
    """With a share of the weights' bytes on the accelerator."""
    context = args.context + args.tokens + 2
    work = Workload(args.context, args.tokens, batch, context, "decode")
    size = sum(info.nbytes for info in infos.values())
    groups = (1,) if policy == "together" else (1, 2)
    policies: Any = "cut" if policy == "cut" else "layer-partition"
    return solve(Problem(
        config, infos, max_sequences=batch, dtype=args.dtype, kv_dtype=args.dtype,
        memory_bytes=memory_available(), profile=profile, workload=work, threads=args.threads,
        accelerator_bytes=int(size * args.share) + ACCELERATOR_RESERVE_BYTES,
        space=Space(policy=policies, decode_groups=groups),
    ))  # fmt: skip


def probes() -> dict[str, float]:
    """Bytes a second that one thread and two read, and multiplications and additions of two."""
    read = {
        f"read_{count}_bytes_per_s": float(
            _helm.stream_read_bytes_per_s(count, PROBE_BYTES, PROBE_S)
        )
        for count in (1, 2)
    }
    return {**read, "fma_2_flops": float(_helm.fma_flops(2, PROBE_S))}


def least_step_s(raw: dict[str, Any], batch: int, dtype: str, probed: dict[str, float]) -> float:
    """Two threads take no less for a step, however it is shared."""
    elements = sum(matrix_elements(raw))
    read_s = elements * BYTES[dtype] / probed["read_2_bytes_per_s"]
    return max(read_s, 2 * elements * batch / probed["fma_2_flops"])


def run(raw: dict[str, Any], name: str, profile: Profile, batch: int, args: Any) -> dict[str, Any]:
    """All policies with so many sequences."""
    config = parse_config(raw, name)
    policies = [policy for policy in POLICIES if batch > 1 or policy != "together"]
    infos, tensors = random_weights(build_graph(config).tensors, args.dtype)
    engines, plans = {}, {}
    for policy in policies:
        study = study_of(config, infos, profile, policy, batch, args)
        best = study.best
        engines[policy] = Engine(study, tensors, args, batch)
        plans[policy] = {
            "units_cpu": study.plan.units_cpu,
            "units_accelerator": study.plan.units_accelerator,
            "units_cut": study.plan.units_cut,
            "decode_groups": study.plan.schedule.decode_groups,
            "cut": None if best.cut is None else dataclasses.asdict(best.cut),
            "predicted_decode_s": best.predicted.decode_s,
            "weights_bytes": {d: use.weights_bytes for d, use in study.plan.memory.items()},
        }
        print(f"  {policy}: predicted {best.predicted.decode_s * 1e3:.2f} ms", plans[policy])
        engines[policy].prefill()
    tokens = {policy: engine.decode()[0] for policy, engine in engines.items()}
    ends = (tokens["layer-partition"], tokens["cut"])
    equal = [a == b for a, b in zip(*ends, strict=False)]
    rounds = []
    for _ in range(args.rounds):
        one: dict[str, float] = probes()
        for policy, engine in engines.items():
            one[policy] = engine.decode()[1]
        rounds.append(one)
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in one.items()))
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    whole, cut = medians["layer-partition"], medians["cut"]
    least_s = statistics.median(least_step_s(raw, batch, args.dtype, one) for one in rounds)
    text = ", ".join(f"{medians[policy] * 1e3:.2f} ms {policy}" for policy in policies)
    print(
        f"  batch {batch}: {text}, {whole / cut:.3f}x; two threads take {least_s * 1e3:.2f} ms at "
        f"least, which would be {whole / least_s:.3f}x"
    )
    return {
        "batch": batch, "plans": plans, "rounds": rounds, "medians": medians,
        "ratio": whole / cut, "most_ratio": whole / least_s,
        "equal_tokens": sum(equal) / len(equal),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="sim:threads=1", help="cuda, cuda:N or sim:...")
    parser.add_argument("--shape", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, or a config")
    parser.add_argument("--layers", type=int, help="blocks at most")
    parser.add_argument("--dtype", choices=list(TORCH_DTYPE), default="f16")
    parser.add_argument("--share", type=float, default=0.5, help="of the weights' bytes")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=128, help="tokens before decode")
    parser.add_argument("--tokens", type=int, default=24, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", help="a preset or file (default: this machine's)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    profile = profile_of(open_accelerator(args.device), args, args.threads)
    name, raw = shape_of(args.shape, args.layers)
    found = []
    for batch in args.batch:
        print(f"{name}, {args.dtype}, {batch} sequences, {time.strftime('%H:%M:%S')}")
        found.append(run(raw, name, profile, batch, args))
        if args.json:
            args.json.write_text(json.dumps({"shape": name, "results": found}, indent=1))


if __name__ == "__main__":
    main()
