"""Small models on random machines, and every layout with cut layers that they can have."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import numpy as np

import search_cases
from helm.base.formats import tensor_bytes
from helm.compiler.choices import choices
from helm.compiler.cut.memory import CutMemory
from helm.compiler.cut.price import CutPrices
from helm.compiler.cut.search import Way
from helm.compiler.cut.ways import Layouts, cut_model
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import Space
from helm.machine.profile import Profile
from helm.model.families import parse_config
from helm.plan.records import Workload

FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "OPTForCausalLM")


def config(seed):
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    blocks, heads = 1 + seed % 3, rng.choice((4, 8))
    common = {
        "architectures": [family],
        "vocab_size": rng.choice((97, 160)),
        "hidden_size": 32,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": seed % 2 == 0,
    }
    if family == "OPTForCausalLM":
        return parse_config({**common, "ffn_dim": 160})
    common |= {"num_key_value_heads": 4, "head_dim": 8 * 8 // heads, "intermediate_size": 160}
    if family == "MistralForCausalLM":
        common["sliding_window"] = 9
    return parse_config(common)


def mixture(seed):
    """Of a mixture of experts, some of whose layers may be dense."""
    rng = random.Random(seed)
    layers = 1 + seed % 4
    return parse_config(
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "vocab_size": rng.choice((97, 160)),
            "hidden_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "num_experts": rng.choice((4, 16)),
            "num_experts_per_tok": rng.choice((1, 3)),
            "mlp_only_layers": [0] if seed % 3 == 1 else [],
            "max_position_embeddings": 512,
            "tie_word_embeddings": seed % 2 == 0,
        }
    )


def problem(seed, objective="decode", model=None, **changes):
    rng = random.Random(seed + 7)
    prompt, output = rng.randint(1, 40), rng.randint(2, 12)
    profile = search_cases.random_profile(seed)
    profile["link"]["latency_s"] = 10 ** rng.uniform(-7, -4)
    work = Workload(prompt, output, rng.choice((1, 1, 2, 3)), prompt + output + 9, objective)
    return Problem(
        config(seed) if model is None else model,
        None,
        max_sequences=work.batch,
        page_tokens=16,
        step_tokens=rng.choice((4, 16, 64)),
        profile=Profile.from_json(json.dumps(profile)),
        workload=work,
        memory_bytes=1 << 40,
        accelerator_bytes=1 << 40,
        reserve_bytes=0,
        space=Space(visit_steps=(16, 128), decode_groups=(1,), overlap=(False,), policy="auto"),
        **changes,
    )


class Every:
    """Every layout for the choices of a search whose steps have the tokens of its limits, with what
    each takes. mode: how prompts run."""

    def __init__(self, search, mode="compute"):
        self.search, self.mode, work = search, mode, search.workload
        every = choices(search.model, search.profile, work, search.limits, search.space)
        self.choice = next(
            (c for c in every if c.mode == mode and c.setting.limits == search.limits), None
        )
        if self.choice is None:  # nothing visits
            return
        self.setting, self.prefill = self.choice.setting, self.choice.steps
        self.cuts = cut_model(search.model, self.setting.classes, search.space.columns)
        self.prices = CutPrices(self.setting, self.cuts)
        self.memory = CutMemory(self.setting, self.cuts, self.choice.each, mode == "visit")

    @property
    def leasts(self):
        """Tokens from which on a step lets weights visit; [None] where none does."""
        if self.choice is None:
            return []
        return [None] if self.mode == "compute" else self.prefill.visit_choices()

    def layouts(self):
        blocks = len(self.setting.classes.member)
        marks = [range(len(ways.marks)) for ways in self.cuts.units]
        ends = [len(each) - 1 for each in marks]
        found = []
        for cpu in range(blocks + 1):
            for cut in range(blocks + 1 - cpu):
                for home in (0, 1) if cut else (0,):
                    for h, e in itertools.product(marks[0], marks[1]) if cut else [(0, 0)]:
                        if cut and (h, e) in ((0, 0), (ends[0], ends[1])):
                            continue
                        for r in marks[2]:
                            if cut or 0 < r < ends[2]:
                                found.append((cpu, cut, home, h, e, r))
        table = Layouts(np.array(found, np.int64).T)
        return table.at(np.isfinite(self.decode(table)))

    def decode(self, of, context=None):
        """[layouts] seconds of a step."""
        price = self.prices.decode(context or self.search.workload.expected_context)
        return price.seconds(of)

    def ttft(self, of, least=None):
        """[layouts]"""
        return self.way(least).ttft_s(of)

    def candidate(self, of, least=None):
        """One layout as the search finds it."""
        search = self.search
        return self.way(least).candidate(of, search.limits, search.workload, (1 << 60, 1 << 60))

    def way(self, least):
        return Way(self.choice, least, self.prices, self.memory)


def counted(plan, format, limits):
    """Bytes by device and purpose: weights, kv and activations, one by one."""
    found = {}
    for device in ("cpu", "accelerator"):
        units = [u for u in plan.units if u.device == device]
        names = {n for u in units for op in u.ops for n in op.weight_names()}
        specs = {t.name: t for t in plan.tensors}
        weights = 0
        for name in names:
            spec = specs[name]
            held = format(spec.whole, device)
            alias = spec.part is not None and spec.whole in names and held != "bf16c"
            if alias and spec.shape[1:] == spec.part.shape[1:] and spec.part.row % 16 == 0:
                continue
            size = tensor_bytes(held, spec.shape)
            weights += size if device == "cpu" else -(-size // 256) * 256
        attentions = [op for u in units for op in u.ops if op.op == "attention"]
        pages = sum(
            op.kv_heads * plan.kv.entry_pages(plan.kv.layers[op.layer]) for op in attentions
        )
        rows = {"tokens": limits.step_tokens, "outputs": limits.step_outputs}
        used = {n for u in units for op in u.ops for n in op.uses()}
        if device == "accelerator" and plan.schedule.visit_tokens:
            visiting = {u.layer for u in plan.units if u.device == "cpu" and u.layer is not None}
            own = [u for u in plan.units if u.layer in visiting]
            used |= {n for u in own for op in u.ops for n in op.uses()}
        values = [4 * v.width * rows[v.rows] for v in plan.values if v.name in used]
        found[device] = {
            "weights": weights,
            "kv": pages * plan.kv.unit_bytes,
            "activations": sum(-(-size // 256) * 256 for size in values),
        }
    return found


def limits_at_random(search, rng, cpu, own):
    """Memory of both devices between the least and the most that plans take, and which plans fit.
    cpu, own: their bytes there."""
    rooms = [
        int(sizes.min() + (sizes.max() - sizes.min()) * rng.uniform(-0.05, 1.1))
        for sizes in (cpu, own)
    ]
    limits = dataclasses.replace(search.limits, cpu_bytes=rooms[0], accelerator_bytes=rooms[1])
    return limits, (cpu <= rooms[0]) & (own <= rooms[1])
