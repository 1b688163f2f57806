"""Everything that pricing needs to know of a model on a machine. Prices nothing.

A layout is a row: where the embedding lies and how many layers, from the first, lie on the CPU.
Arrays run over rows and over `pages`, the KV blocks per sequence and layer for which the
accelerator has slots.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from helm.compiler.counts import CostedGraph, Step
from helm.compiler.overflow import Bools, Pool
from helm.compiler.problem import KvPlace, ResourceLimits, Space
from helm.compiler.times import DEVICE_TERMS, F64, I64, BlockClasses, classify, unit_s
from helm.machine.profile import Profile
from helm.machine.rates import AcceleratorProfile, CpuProfile, LinkProfile, beside_another
from helm.plan.kv import window_blocks
from helm.plan.records import Workload

T = TypeVar("T")
Site = Literal["cpu", "accelerator"]
Device = CpuProfile | AcceleratorProfile
F32 = 4  # bytes of an activation
_VISITING_TOKENS = 8192  # of prompts that are longer than planned
_MOST_PAGES = 128  # choices of `pages` that are tried; finer steps change little


@dataclass(frozen=True)
class Rows:
    """Layouts: boundary[r] blocks on the CPU, embedded[r]: the embedding is on the accelerator."""

    boundary: I64
    embedded: Bools
    blocks: int

    @functools.cached_property
    def has_blocks(self) -> Bools:
        """Whether the accelerator holds any block."""
        return np.asarray(self.boundary < self.blocks)

    def uses_accelerator(self, head: Site) -> Bools:
        return np.asarray(self.has_blocks | self.embedded | (head == "accelerator"))


@dataclass(frozen=True)
class Setting:
    """Everything that pricing needs to know, for one thread count and one number of sequences."""

    model: CostedGraph
    cpu: CpuProfile
    accelerator: AcceleratorProfile | None
    link: LinkProfile | None
    workload: Workload
    limits: ResourceLimits
    batch: int
    rows: Rows
    pages: I64  # [pages], falling
    classes: BlockClasses = field(repr=False)
    mapped_weights: bool = False
    # Of settings that differ in threads, batch or step_tokens alone: by what it is and depends on.
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: object, make: Callable[..., T], *args: Any) -> T:
        """What another setting has found already, or what this one makes."""
        if key not in self.known:
            self.known[key] = make(*args)
        found: T = self.known[key]
        return found

    @property
    def hidden(self) -> int:
        """Width of the value that crosses between stages."""
        return self.width(getattr(self.model.graph.units[-1].ops[0], "input"))  # noqa: B009

    @property
    def vocab(self) -> int:
        return self.width(self.model.graph.logits)

    def width(self, value: str) -> int:
        """Floats of one row of a value."""
        return next(v.width for v in self.model.graph.values if v.name == value)

    @property
    def most_sequences(self) -> int:
        """As many as may have a row in one step."""
        return max(self.limits.sequences, self.batch)

    def pages_of(self, tokens: int) -> int:
        """KV blocks of one layer that hold `tokens` positions."""
        return -(-tokens // self.limits.page_tokens)

    @functools.cached_property
    def pool(self) -> Pool:
        """The accelerator's KV blocks; a choice of slots for each of `pages`."""
        limits, blocks = self.limits, self.batch * self.pages_of(self.workload.context)
        slots = self.batch * self.pages
        return Pool(slots, blocks, self.batch, limits.page_tokens, limits.watermark)

    def window_blocks(self) -> int:
        """Pages of a layer with a window, of all sequences, where nothing overflows."""
        limits = self.limits
        most = self.batch * self.pages_of(self.workload.context)
        layers, tokens = self.model.graph.kv.layers, min(limits.page_tokens, self.workload.context)
        step_tokens = max(limits.step_tokens, self.most_sequences)
        return min(most, window_blocks(layers, tokens, step_tokens, self.most_sequences))

    @functools.cached_property
    def decode_units(self) -> dict[str, F64]:
        """`unit_times` of a decode step, which has attention apart: no context changes them."""
        return unit_times(self, Step(self.batch, 1, self.batch))

    @functools.cached_property
    def halves(self) -> tuple[Setting, Setting]:
        """Of the sequences, in two groups; one and the same if they are equal."""
        sizes = (self.batch + 1) // 2, self.batch // 2
        of = {size: dataclasses.replace(self, batch=size) for size in sizes}
        return of[sizes[0]], of[sizes[1]]

    @functools.cached_property
    def beside(self) -> Setting:
        """With the rates of both devices while both work; this one where they keep them."""
        share = 1.0 if self.link is None else self.link.rate_while_both_compute
        if self.accelerator is None or self.link is None or share >= 1.0:
            return self
        return dataclasses.replace(
            self,
            cpu=beside_another(self.cpu, share),
            accelerator=beside_another(self.accelerator, share),
            link=dataclasses.replace(self.link, rate_while_both_compute=1.0),
            known=self.once("beside", dict),
        )

    @property
    def visit_bytes_per_s(self) -> float:
        """Of the CPU's weights on their way to the accelerator."""
        assert self.link is not None
        if self.mapped_weights and not self.link.locks_mapped:
            return self.link.pageable_to_accelerator_bytes_per_s
        return self.link.to_accelerator_bytes_per_s

    @property
    def visit_pages(self) -> int:
        """Page slots for a layer of the batch's prompts while its weights visit: of those planned
        for, and of longer ones that people send, as the context allows."""
        longest = max(self.workload.prompt, min(self.workload.context, _VISITING_TOKENS))
        return self.batch * self.pages_of(longest)

    def counts(self) -> tuple[F64, F64]:
        """[rows, classes] blocks on the CPU and on the accelerator."""
        return self.once("counts", self._counts)

    def _counts(self) -> tuple[F64, F64]:
        first = self.classes.before(self.rows.boundary)
        return first, self.classes.before([self.rows.blocks])[0] - first


def make_setting(
    model: CostedGraph,
    profile: Profile,
    workload: Workload,
    limits: ResourceLimits,
    threads: int,
    batch: int,
    *,
    space: Space | None = None,
    classes: BlockClasses | None = None,
    known: dict[object, Any] | None = None,
) -> Setting:
    """The rows are all layouts: all on the accelerator first, then by boundary. known: see
    `Setting`."""
    space = space or Space()
    kv: KvPlace = space.kv
    blocks = len(model.graph.layers)
    boundary = np.arange(blocks + 1)
    embedded = np.zeros(blocks + 1, bool)
    if profile.accelerator is None:
        kv, boundary, embedded = "host", boundary[-1:], embedded[-1:]
    else:
        boundary, embedded = np.insert(boundary, 0, 0), np.insert(embedded, 0, True)
    return Setting(
        model,
        profile.cpu.complete.with_threads(threads),
        None if profile.accelerator is None else profile.accelerator.complete,
        profile.link,
        workload,
        limits,
        batch,
        Rows(boundary, embedded, blocks),
        page_choices(workload.context, limits.page_tokens, kv),
        classify(model) if classes is None else classes,
        space.mapped_weights,
        {} if known is None else known,
    )


def page_choices(context: int, page_tokens: int, kv: KvPlace = "any") -> I64:
    """From all KV blocks of a sequence down to none, evenly thinned when there are many."""
    most = -(-context // page_tokens)
    if kv != "any":
        return np.array([most if kv == "device" else 0], np.int64)
    choices = np.round(np.linspace(most, 0, min(most, _MOST_PAGES) + 1))
    return np.array(sorted(set(choices.tolist()), reverse=True), np.int64)


def unit_times(setting: Setting, step: Step) -> dict[str, F64]:
    """Times of every kind of unit on both devices for `device_base`."""
    found = setting.once((step, setting.cpu.threads), _site_times, setting, step, setting.cpu)
    if setting.accelerator is None:
        return found
    return found | setting.once(step, _site_times, setting, step, setting.accelerator)


def _site_times(setting: Setting, step: Step, device: Device) -> dict[str, F64]:
    first, last = setting.model.graph.units[0], setting.model.graph.units[-1]
    blocks = [unit_s(setting.model, unit, step, device) for unit in setting.classes.units]
    return {
        f"{device.site} blocks": np.array(blocks).reshape(-1, DEVICE_TERMS),
        f"{device.site} embedding": unit_s(setting.model, first, step, device),
        f"{device.site} head": unit_s(setting.model, last, step, device),
    }
