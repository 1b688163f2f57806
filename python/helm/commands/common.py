"""Loading, plan line and summary that several commands share; knows nothing of their output."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

from helm.base.familiar import as_options
from helm.base.formats import uncompressed
from helm.base.paths import kind, permitted
from helm.base.sizes import counted
from helm.commands import options
from helm.commands.lines import say
from helm.text.completion import Completion
from helm.text.sampling import SamplingParams, sampling_params

if TYPE_CHECKING:
    from helm.plan.schema import Plan
    from helm.session.llm import LLM


def require_text(args: argparse.Namespace) -> None:
    """Refuses a local folder without a tokenizer before its weights are read."""
    from helm.model.hub import is_gguf, resolve_model
    from helm.text.tokenizer import require_tokenizer

    folder = os.path.expanduser(args.model or "")
    with permitted("model"):
        if args.tokenizer is None and kind(folder) == "folder":
            found = resolve_model(folder)
            if not is_gguf(found):
                require_tokenizer(found)


def load(args: argparse.Namespace, expected_tokens: int | None = None) -> LLM:
    """The model that the options name.

    expected_tokens: see helm.LLM.
    """
    from helm.commands.measuring import MeasureProgress
    from helm.session.llm import LLM
    from helm.session.options import StudyKeywords

    with MeasureProgress() as measuring:
        return LLM(
            args.model,
            revision=args.revision,
            tokenizer=args.tokenizer,
            expected_tokens=expected_tokens,
            measuring=measuring.update,
            speculate=getattr(args, "speculate", "auto"),
            **options.keywords(args, StudyKeywords),
        )


def answer_sampling(llm: LLM, sampling: SamplingParams, args: argparse.Namespace) -> SamplingParams:
    """`sampling` of an answer: it may be long where neither user nor model bounds it."""
    if args.max_tokens is not None:
        return sampling
    return sampling_params(sampling, {"max_tokens": llm.max_new_tokens})


def plan_line(llm: LLM) -> str:
    """What runs where: model, parameters, bytes, KV cache, device, threads, isa."""
    plan, stats = llm.plan, llm.stats
    elements = {tensor.whole: math.prod(tensor.whole_shape) for tensor in plan.tensors}
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    matrices = (held for held in plan.slices if len(shapes[held.tensor]) == 2)
    formats = dict.fromkeys(uncompressed(held.format) for held in matrices)
    kv_bytes = sum(use.kv_bytes for use in plan.memory.values())
    parts = [
        f"{llm.name} ({plan.model.architecture})",
        f"{count_text(sum(elements.values()))} parameters",
        f"weights {binary_bytes(stats['weights_bytes'])} {'+'.join(formats)}, {plan.loading}",
        f"KV {plan.kv.dtype}, context {llm.context}, up to {binary_bytes(kv_bytes)}"
        f"{_overflow(plan)}",
        f"{_devices(plan, stats)}, {counted(stats['threads'], 'thread')}, {stats['isa']}",
    ]
    if (draft := stats["speculation"].get("draft")) is not None:
        parts.append(f"{draft['name']} guesses, {binary_bytes(draft['memory_bytes'])} of RAM")
    rate = predicted_rate(llm)
    if rate is not None:
        parts.append(f"predicted {rate:,.1f} tokens/s")
    return f"[plan: {' | '.join(parts)}]"


def _devices(plan: Plan, stats: dict[str, Any]) -> str:
    """ "cpu", or "cpu embedding + layers 0-3, 1.2 MiB; sim layers 4-7 + head, 1.0 MiB"."""
    if len(stats["devices"]) == 1:
        return "cpu"
    parts = [
        f"{use['kind']} {' + '.join(use['units'])}, {binary_bytes(use['weights_bytes'])}"
        for use in stats["devices"]
        if use["units"]
    ]
    if plan.schedule.prefill == "visit":
        parts.append(f"prompts on {stats['devices'][1]['kind']}, to which weights are copied")
    return "; ".join(parts)


def _overflow(plan: Plan) -> str:
    """Where KV lies that the accelerator has no room for; empty where it has room for all."""
    if not plan.overflows:
        return ""
    there = binary_bytes(sum(use.kv_bytes for d, use in plan.memory.items() if d != "cpu"))
    reached = "read by the CPU" if plan.schedule.overflow == "cpu" else "copied to it in each step"
    return f" ({there} on the GPU; the rest in RAM is {reached})"


def placement(llm: LLM) -> dict[str, Any]:
    """The plan for --json: its line, notices, what each device holds, the predicted rate."""
    return {
        "plan": plan_line(llm),
        "notices": [as_options(notice) for notice in llm.plan.notices],
        "devices": llm.stats["devices"],
        "loading": loading(llm),
        "predicted_decode_tokens_per_s": predicted_rate(llm),
    }


def loading(llm: LLM) -> dict[str, Any]:
    """For --json: how the host's weights were loaded and why, and on which pages they lie."""
    choice, stats = llm.plan.loading_choice, llm.stats
    return {
        "weights": llm.plan.loading,
        **({} if choice is None else dataclasses.asdict(choice)),
        "copied_bytes": stats["copied_bytes"],
        "huge_page_bytes": stats["huge_page_bytes"],
        "load_s": stats["load_s"],
    }


def predicted_rate(llm: LLM, sequences: int = 1) -> float | None:
    """Decode tokens/s of so many sequences together by the plan's own prediction, or else by this
    machine's profile if `helm-llm profile` has measured it; never measures. None if nothing is
    known, as of several on an accelerator that was planned for one."""
    from helm.compiler.advice import cpu_decode_rate
    from helm.errors import HelmError
    from helm.measure.profile_cache import cached_profile

    if llm.plan.prediction is not None:
        predicted = llm.plan.prediction.predicted
        if sequences in (1, predicted.sequences):
            return predicted.decode_tokens_per_s / predicted.sequences * sequences
        if len(llm.stats["devices"]) > 1:
            return None
    try:
        profile = cached_profile()
        return (
            None if profile is None else cpu_decode_rate(llm.config, llm.plan, profile, sequences)
        )
    except HelmError:
        return None  # a line for information; loading has succeeded


def say_plan(llm: LLM) -> None:
    """The plan line and what the planner found worth saying."""
    say(plan_line(llm))
    for notice in llm.plan.notices:
        say(f"note: {as_options(notice)}")
    if reason := llm.stats["speculation"]["reason"]:
        say(f"note: no tokens are guessed: {reason}")


def summary_line(llm: LLM, completion: Completion, restored: int = 0, context: bool = False) -> str:
    """What was reached: prompt tokens/s, time to first token, decode tokens/s, bandwidth,
    and threads where not all decode.

    restored: tokens of a KV cache that was loaded from a file for this. context: whether to say
    how much of the context is in use.
    """
    t = completion.timings
    parts = [f"prompt {counted(completion.prompt_tokens, 'token')}"]
    reused = completion.prompt_tokens - t.prefill_tokens
    if not completion.tokens:
        return f"[{parts[0]} | nothing generated | {completion.finish_reason}]"
    if reused > 0:
        parts[0] += f" ({reused} reused{f' of {restored} restored' if restored else ''})"
    parts[0] += f", {t.prefill_tokens_per_s:,.1f} tokens/s"
    parts.append(f"first token {t.ttft_s * 1e3:,.1f} ms")
    decode = f"output {counted(len(completion.tokens), 'token')}"
    if t.decode_tokens:
        decode += f", {t.decode_tokens_per_s:,.1f} tokens/s"
        parts += [decode, f"{t.decode_bytes_per_s / 1e9:,.2f} GB/s"]
    else:
        parts.append(decode)
    if t.guessed_tokens:
        parts.append(f"{t.accepted_tokens} of {t.guessed_tokens} guesses right")
    stats = llm.stats
    if stats["active_threads"] < stats["threads"]:
        parts.append(
            f"{stats['active_threads']} of {counted(stats['threads'], 'thread')}: others are busy"
        )
    if context:
        used = min(completion.prompt_tokens + len(completion.tokens), llm.context)
        parts.append(f"context {used:,} of {llm.context:,}")
    parts.append(completion.finish_reason)
    return f"[{' | '.join(parts)}]"


def binary_bytes(count: float) -> str:
    """ "12.3 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count_text(number: int) -> str:
    """ "1.24 billion", "135 million"."""
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
