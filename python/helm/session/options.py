"""What a user says about placing and loading a model: the one list of options, and the problem that
they pose to the planner. Plans nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from helm.base.arguments import check_call, count, is_one_of, items_of, shown
from helm.base.progress import Progress
from helm.base.sizes import check_size
from helm.compiler.kv_options import PAGE_TOKENS, KvOptions, check_page_tokens
from helm.compiler.load_cost import ANSWERS, WEIGHTS, LoadingRequest
from helm.compiler.planning_problem import Problem
from helm.compiler.problem import POLICIES, Space
from helm.errors import InvalidError
from helm.machine.profile import Profile, as_profile
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.plan.records import OBJECTIVES, Workload, tokens_within

Measuring = Callable[[str, float], None]  # (what is measured now, share done from 0 to 1)

_COUNTS = ("max_sequences", "batch")
_TOKENS = ("prompt_tokens", "output_tokens", "expected_tokens")
_CONTEXT = 4096
_STEP_TOKENS = 512
_KV = (("kv_overflow", "auto"), ("kv_vram_bytes", None), ("watermark", None))
_LIMITS = ("context", "threads", "memory_bytes", "vram_bytes", *_TOKENS)


class PlanKeywords(TypedDict, total=False):
    """What every place that plans takes by name, see helm.LLM."""

    context: int | None
    max_sequences: int
    dtype: str
    kv_dtype: str
    threads: int | None
    page_tokens: int | None
    policy: str
    kv_overflow: str
    kv_vram_bytes: int | None
    watermark: float | None
    memory_bytes: int | None
    device: str | None
    vram_bytes: int | None
    profile: Profile | str | os.PathLike[str] | None
    prompt_tokens: int | None
    output_tokens: int | None
    batch: int
    objective: str
    measuring: Measuring | None


class TorchKeywords(PlanKeywords, total=False):
    """What `LLM.from_torch` takes by name: those of LLM(...) that are not about files."""

    prefix_cache: bool
    speculate: str | os.PathLike[str]
    progress: Progress | bool | None


class StudyKeywords(PlanKeywords, total=False):
    """What `helm.study` takes by name."""

    weights: str
    copies: Sequence[str | os.PathLike[str]]
    expected_tokens: int | None


@dataclass(frozen=True)
class LoadOptions:
    """What the user says about placing a model; see helm.LLM. copies: folders."""

    context: int | None = None
    max_sequences: int = 8
    dtype: str = "auto"
    kv_dtype: str = "auto"
    threads: int | None = None
    page_tokens: int | None = PAGE_TOKENS
    policy: str = "auto"
    kv: KvOptions = field(default_factory=KvOptions)
    weights: str = "auto"
    copies: tuple[Path, ...] = ()
    progress: Progress | None = None
    memory_bytes: int | None = None
    device: str | None = None
    vram_bytes: int | None = None
    profile: Profile | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    expected_tokens: int | None = None
    batch: int = 1
    objective: str = "total"
    measuring: Measuring | None = None

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_LIMITS):
            value = getattr(self, name)
            if value is None and name in _LIMITS:
                continue
            object.__setattr__(self, name, count(value, f"[load] {name}"))
        sizes = {"memory_bytes": self.memory_bytes, "vram_bytes": self.vram_bytes}
        for name, size in {**sizes, "kv_vram_bytes": self.kv.vram_bytes}.items():
            if size is not None:
                check_size(size, f"[load] {name} is {size}", f"{size} << 30")
        object.__setattr__(self, "page_tokens", check_page_tokens(self.page_tokens))
        choices: dict[str, tuple[str, ...]] = {
            "weights": WEIGHTS, "objective": OBJECTIVES, "policy": POLICIES,
        }  # fmt: skip
        for name, options in choices.items():
            if not is_one_of(getattr(self, name), options):
                found = shown(getattr(self, name))
                raise InvalidError(f"[load] {name} must be {', '.join(options)}, got {found}")
        check_call(self.progress, "[load] progress", "progress(done, total)")
        check_call(self.measuring, "[load] measuring", "measuring(what, share)")

    def workload(self, config: ModelConfig) -> Workload:
        """What the placement is to be fast for. Where nothing is said: 512 and 128 tokens, less if
        the context is shorter, and a context of 4096, less if the model allows less, more if
        prompt and output need more. Raises InvalidError."""
        most = config.max_context if self.context is None else self.context
        prompt, output = tokens_within(most, self.prompt_tokens, self.output_tokens)
        if prompt + output > config.max_context:
            raise InvalidError(
                f"[plan] prompt and output take {prompt + output} positions, the model allows "
                f"{config.max_context}{config.context_reason}; shorten them with prompt_tokens= "
                "and output_tokens="
            )
        context = self.context
        if context is None:
            context = min(max(_CONTEXT, prompt + output), config.max_context)
        objective: Any = self.objective
        return Workload(prompt, output, self.at_once, context, objective)

    @property
    def at_once(self) -> int:
        """Requests that are planned for; of a service as many as there may be."""
        return max(self.batch, self.max_sequences) if self.objective == "serve" else self.batch

    def problem(
        self,
        config: ModelConfig,
        infos: Mapping[str, TensorInfo] | None,
        profile: Profile | None,
        **machine: Any,
    ) -> Problem:
        """For the machine of `profile`, or for the CPU alone, where a service has nothing to place
        and loads as for "total". machine: what else of Problem is known of the place where the
        model is to run."""
        sequences = max(self.max_sequences, self.batch)
        at_once, objective = self.at_once, self.objective
        if profile is None and objective == "serve":
            at_once, objective = self.batch, "total"
        tokens = self.expected_tokens
        if tokens is None and self.output_tokens is not None:
            tokens = ANSWERS * self.output_tokens * at_once
        goal: Any = objective
        policy: Any = self.policy
        return Problem(
            config,
            infos,
            context=self.context if profile is None else None,
            workload=None if profile is None else self.workload(config),
            max_sequences=sequences,
            step_tokens=max(_STEP_TOKENS, sequences),
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_tokens=self.page_tokens,
            kv_options=self.kv,
            space=Space(policy=policy),
            profile=profile,
            **{
                "memory_bytes": self.memory_bytes,
                "accelerator_bytes": self.vram_bytes,
                "loading": LoadingRequest(self.weights, tokens, goal, at_once),
                **machine,
            },
        )


def load_options(given: Mapping[str, Any], progress: Progress | None = None) -> LoadOptions:
    """Of what a function was given by name, that which is about placing and loading. progress:
    what is to be called."""
    known = {f.name for f in fields(LoadOptions)} - {"kv", "progress"}
    chosen = {name: value for name, value in given.items() if name in known}
    kv = KvOptions(*(given.get(name, default) for name, default in _KV))
    profile = as_profile(chosen.pop("profile", None))
    copies = _folders(chosen.pop("copies", ()))
    return LoadOptions(**chosen, kv=kv, profile=profile, copies=copies, progress=progress)


def _folders(copies: Any) -> tuple[Path, ...]:
    """Of a GGUF file the one in which it lies."""
    items = items_of(copies)
    if items is None or not all(isinstance(each, (str, os.PathLike)) for each in items):
        raise InvalidError(
            f"[load] copies must be a list of folders or GGUF files, got {shown(copies)}"
        )
    paths = [Path(os.path.expanduser(os.fsdecode(each))) for each in items]
    return tuple(path.parent if os.path.isfile(path) else path for path in paths)
