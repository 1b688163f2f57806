"""Plans and loads on this machine: which devices, which profile, how much of each memory.

An accelerator's plan is searched with the machine's profile; the CPU alone needs none.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.sizes import size_text
from helm.compiler.abilities import check_vram
from helm.compiler.format_choice import others_text
from helm.compiler.planning_problem import Problem
from helm.compiler.solve import solve
from helm.errors import CompressionError, InvalidError, OutOfMemoryError, ProfileError
from helm.machine.devices import CPU, Accelerator, find_accelerator, open_accelerator
from helm.machine.grants import Grant, file_key, in_turn
from helm.machine.memory_nodes import tiers_here
from helm.machine.profile import Profile
from helm.machine.rates import ACCELERATOR_RESERVE_BYTES, CpuProfile
from helm.machine.resources import (
    Machine,
    cpu_affinity,
    cpus_to_pin,
    memory_available,
    read_machine,
    useful_threads,
)
from helm.model.checkpoint import TensorInfo
from helm.model.config import ModelConfig
from helm.plan.schema import Plan
from helm.plan.units import PlacedUnit
from helm.session.disk import (
    Drives,
    any_profile,
    drives_of,
    read_through_cache,
    study_from_disk,
    unused_copies,
)
from helm.session.host_memory import check_plan, granted_text, host_use, pageable
from helm.session.options import LoadOptions

if TYPE_CHECKING:
    from helm.measure.threads import ThreadChoice

_LOADS = 3  # attempts, each with what is free then
_MACHINE = ("cpu", "isa", "cores")  # of a profile's identity
_log = logging.getLogger("helm")


@dataclass(frozen=True)
class Target:
    """Where to plan for. profile None: the CPU, as it is. notices: what to say about the device.
    drives: where the model's files lie, if it has some."""

    machine: Machine
    accelerator: Accelerator | None
    profile: Profile | None
    notices: tuple[str, ...] = ()
    drives: Drives = field(default_factory=dict)


def load_engine(
    config: ModelConfig,
    infos: Mapping[str, TensorInfo],
    directory: str,
    tensors: Mapping[str, Any],
    options: LoadOptions,
    notices: tuple[str, ...] = (),
) -> tuple[Plan, Any]:
    """Plans, loads, and plans again where an accelerator has less free by then than planned.

    tensors: those bound from memory, by name. notices: what the plan shall say first. Raises
    what `solve`, `open_accelerator` and the engine raise.
    """
    drives = drives_of(infos, directory, options.copies)
    target = dataclasses.replace(find_target(options), drives=drives)
    notices += (*target.notices, *_foreign(options.profile))
    attempts = _LOADS
    while True:
        plan, grant = plan_and_take(config, infos, directory, options, target)
        said = (*notices, *plan.notices, *_too_many(plan.threads))
        plan = dataclasses.replace(plan, notices=said)
        try:
            engine = _engine(plan, directory, tensors, options, target, grant)
            said = (*said, *pageable(engine.stats), *read_through_cache(engine.stats))
            return dataclasses.replace(plan, notices=said), engine
        except CompressionError as error:
            if options.weights != "auto":
                raise
            options = dataclasses.replace(options, weights="copied")
            notices += (f"{error}; this was done",)
        except OutOfMemoryError:
            planned = target.accelerator
            attempts -= 1
            found = None if attempts == 0 or planned is None else _with_less(planned, plan)
            if planned is None or found is None:
                raise
            notices += (
                f"{found.name} had {size_text(found.free_bytes)} free when the model was loaded, "
                f"not {size_text(planned.free_bytes)}; placed again with that",
            )
            target = dataclasses.replace(target, accelerator=found)


def _foreign(profile: Profile | None) -> tuple[str, ...]:
    """Says whose rates decide if they are not this machine's."""
    from helm.measure.cpu import identity

    own = identity()
    if profile is None or all(profile.identity.get(name) == own[name] for name in _MACHINE):
        return ()
    return (
        f"units are placed by the rates of {profile.name}, another machine; the predicted rate is "
        "for that one, the memory this one's",
    )


def _too_many(threads: int) -> list[str]:
    """Says so when more threads were asked for than can run."""
    cpus = len(cpu_affinity())
    if threads <= cpus:
        return []
    return [
        f"{threads} threads take turns at {cpus} CPU{'s' * (cpus > 1)}, which is slow; leave "
        "threads= out, or give no more than that"
    ]


def _with_less(planned: Accelerator, plan: Plan) -> Accelerator | None:
    """The accelerator as it is now; None where lack of its memory is not what stopped the plan."""
    if plan.accelerator is None:
        return None
    found = open_accelerator(planned.specification)
    return found if found.free_bytes < plan.memory[plan.accelerator].total_bytes else None


def find_target(options: LoadOptions) -> Target:
    """Opens the device; measures the machine if its profile is needed and not cached."""
    machine = read_machine()
    given, device = options.profile, options.device
    if device is None and given is not None and given.accelerator is None:
        device = CPU  # the profile of a machine without one
    notices: list[str] = []
    accelerator = find_accelerator(device, notices)
    if accelerator is None:
        check_vram(None, options.vram_bytes, options.kv.vram_bytes)
        if given is not None:
            given = dataclasses.replace(given, accelerator=None, link=None)
        return Target(machine, None, given, tuple(notices))
    profile = given or measured_profile(accelerator, options, notices)
    if profile.accelerator is None:
        raise InvalidError(
            f"[load] profile {profile.name!r} has no accelerator, but {accelerator.specification} "
            "is to be used; choose another profile=, or measure this machine with helm-llm "
            f"profile --device {accelerator.specification}"
        )
    return Target(machine, accelerator, profile, tuple(notices))


def measured_profile(
    accelerator: Accelerator | None, options: LoadOptions, notices: list[str]
) -> Profile:
    """This machine's profile. notices: takes what one that was measured now says of itself."""
    from helm.measure.profile_cache import machine_profile

    measured = False

    def tell(what: str, share: float) -> None:
        nonlocal measured
        if options.measuring is not None:
            options.measuring(what, share)
        elif not measured:
            beside = "" if accelerator is None else f" with {accelerator.name}"
            _log.warning("measuring this machine%s, once, 10 to 15 s", beside)
        measured = True

    profile = machine_profile(accelerator, progress=tell)
    if measured:
        notices += profile.notices
    return profile


def plan_and_take(
    config: ModelConfig,
    infos: Mapping[str, TensorInfo],
    directory: str,
    options: LoadOptions,
    target: Target,
) -> tuple[Plan, Grant]:
    """A plan for what is free now, and what it takes of that, granted: no other model gets it."""
    shared = set()  # mapped weights lie in the page cache once, whoever reads them
    if options.weights in ("auto", "mapped"):
        shared = {file_key(Path(directory, file)) for file in _files(infos)}
    with in_turn():
        free_bytes = memory_available(shared=shared)
        machine = dataclasses.replace(target.machine, memory_bytes=free_bytes)
        bounded = options.memory_bytes is not None and options.memory_bytes <= free_bytes
        granted = "" if bounded else granted_text()
        here = dataclasses.replace(target, machine=machine)
        try:
            plan = plan_here(config, infos, options, here)
        except OutOfMemoryError as error:
            others = others_text(problem_here(config, infos, options, here))
            raise OutOfMemoryError(f"{error}{granted}{others}") from None
        use = host_use(plan, infos, directory, target.accelerator)
        try:
            check_plan(use, free_bytes)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"{error}{granted}") from None
        return plan, Grant(use.own_bytes, use.loaded_bytes, use.files)


def _files(infos: Mapping[str, TensorInfo]) -> set[str]:
    return {file for info in infos.values() for file in info.files}


def plan_here(
    config: ModelConfig,
    infos: Mapping[str, TensorInfo],
    options: LoadOptions,
    target: Target,
) -> Plan:
    """What solves `problem_here`; where nothing fits, with weights that are read in every step."""
    try:
        return unused_copies(solve(problem_here(config, infos, options, target)), options).plan
    except OutOfMemoryError as refused:
        profile = target.profile

        def reading(profile: Profile) -> Problem:
            return problem_here(
                config, infos, options, dataclasses.replace(target, profile=profile)
            )

        measured = None if profile else lambda: reading(measured_profile(None, options, []))
        if not target.drives:
            raise
        try:
            problem = reading(any_profile() if profile is None else profile)
            return study_from_disk(problem, target.drives, options, refused, measured).plan
        except (InvalidError, ProfileError):  # that machine's rates know no such weights
            raise refused from None


def problem_here(
    config: ModelConfig,
    infos: Mapping[str, TensorInfo],
    options: LoadOptions,
    target: Target,
) -> Problem:
    """Within what the machine and the options grant; the profile decides only what is best."""
    from helm.measure.profile_cache import cached_profile

    machine, profile = target.machine, target.profile
    given: dict[str, Any] = {"memory_bytes": _least(machine.memory_bytes, options.memory_bytes)}
    if profile is None:
        best = _threads_for(sum(info.nbytes for info in infos.values()), machine)
        known = cached_profile()  # its rates say how to load; they are never measured for that
        problem = options.problem(
            config, infos, None, threads=options.threads or best.threads, accelerator_bytes=None,
            **given,
        )  # fmt: skip
        cpu = None if known is None else tiers_here(known.cpu, machine.memory_bytes, cpu_affinity())
        loading = dataclasses.replace(
            problem.loading,
            cpu=cpu,
            compressed_ratio=best.compressed_ratio,
        )
        return dataclasses.replace(problem, loading=loading)
    counts = [n for n in profile.cpu.thread_sweep if n <= machine.threads] or [machine.threads]
    if options.threads is not None:
        counts = [options.threads]
    cpu = tiers_here(profile.cpu, machine.memory_bytes, cpu_affinity())
    profile = dataclasses.replace(profile, cpu=with_thread_counts(cpu, counts))
    if target.accelerator is not None and profile.accelerator is not None:
        own = target.accelerator.present(profile.accelerator)
        profile = dataclasses.replace(profile, accelerator=own)
        left = own.memory_bytes - own.reserve_bytes
        vram_bytes = options.vram_bytes
        if vram_bytes is not None and vram_bytes - ACCELERATOR_RESERVE_BYTES >= left:
            given["accelerator_bytes"] = None
    return options.problem(config, infos, profile, **given)


def _threads_for(weights_bytes: int, machine: Machine) -> ThreadChoice:
    """What this machine does best with, measured when a model first needs more than one."""
    from helm.measure.threads import ThreadChoice, choose_here

    useful = useful_threads(weights_bytes, machine.threads)
    if useful == 1:
        return ThreadChoice(1, (), "the model is small")
    choice = choose_here()
    return dataclasses.replace(choice, threads=min(useful, choice.threads))


def _least(found: int, limit: int | None) -> int:
    return found if limit is None else min(found, limit)


def with_thread_counts(cpu: CpuProfile, counts: Iterable[int]) -> CpuProfile:
    """`cpu` on a machine that runs these numbers of threads; one that was not measured has the
    rates of the nearest that was."""
    nearest = {n: min(cpu.thread_sweep, key=lambda m: (abs(m - n), m)) for n in counts}
    sweep = {n: cpu.thread_sweep[m] for n, m in nearest.items()}
    if sweep == cpu.thread_sweep:
        return cpu
    threads = min(nearest, key=lambda n: (abs(n - cpu.threads), n))
    cpu = cpu.with_threads(nearest[threads])
    return dataclasses.replace(cpu, threads=threads, thread_sweep=sweep)


def units_by_device(plan: Plan) -> dict[str, list[str]]:
    """What lies on each device: "embedding", "layers 0-3", ..., in order; of a layer on two devices
    "layer 4 attention" or "layer 4 mlp", on both if that is cut."""
    from helm.compiler.segments import layers_label

    places = {unit.layer: set[str]() for unit in plan.units}
    for unit in plan.units:
        places[unit.layer].add(unit.device)

    def alone(unit: PlacedUnit) -> str:
        """Of a unit that has a label of its own."""
        if unit.layer is None:
            return unit.kind
        return "" if len(places[unit.layer]) == 1 else f"layer {unit.layer} {unit.kind}"

    held: dict[str, list[str]] = {device.name: [] for device in plan.devices}
    for (device, label), run in itertools.groupby(plan.units, lambda u: (u.device, alone(u))):
        layers = [unit.layer for unit in run if unit.layer is not None]
        name = label or layers_label(layers[0], layers[-1])
        if name not in held[device]:  # what is cut has several units there
            held[device].append(name)
    return held


def _engine(
    plan: Plan,
    directory: str,
    tensors: Mapping[str, Any],
    options: LoadOptions,
    target: Target,
    grant: Grant,
) -> Any:
    """Holds the grant for as long as it lives."""
    from helm import _helm

    def progress(done: int, total: int) -> None:
        grant.loaded(done / max(1, total))
        if options.progress is not None:
            options.progress(done, total)

    placed = {tensor.whole for tensor in plan.tensors}
    device = CPU if target.accelerator is None else target.accelerator.specification
    _helm.return_freed_memory()  # what planning took is free before weights come
    try:
        engine = _helm.Engine(
            plan.to_json(),
            directory,
            {name: tensor for name, tensor in tensors.items() if name in placed},
            threads=options.threads or 0,
            progress=progress,
            device=device,
            cpus=cpus_to_pin(cpu_affinity(), plan.threads),
            copies=options.copies,
        )
        grant.settle(engine.lazy_memory)
    except BaseException:
        grant.close()
        raise
    weakref.finalize(engine, grant.close)
    return engine
