"""The engine's own thread, as Python has it: jobs go in from any thread, tokens come out."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from helm.base.arguments import shown
from helm.base.progress import Progress
from helm.errors import CapacityError, InvalidError
from helm.text.prompts import Job
from helm.text.sampling import SamplingParams

T = TypeVar("T")
CLOSED = "[generate] this LLM is closed; make a new one"
PATIENCE_S = 0.05  # how long native code waits between two chances for Ctrl-C
_services: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _freeze() -> None:
    """No engine works while the process ends; threads that wait for one wait on."""
    for native in list(_services):
        native.freeze()


class Service:
    """Steps an engine. Calls may come from any thread; what needs the engine at rest, as a sequence
    of one's own does, has its turn between two steps.

    In a forked child, which lacks the thread, calls raise InvalidError, and what is given back is
    left as it is.
    """

    def __init__(self, engine: Any, prefix_cache: bool, drafter: Any = None) -> None:
        from helm import _helm

        self._native = _helm.Service(engine, prefix_cache, drafter)
        self.engine = engine
        self._changed = threading.Condition()  # guards what follows
        self._holders: dict[int, int] = {}  # sequence -> thread
        self._closed = False
        self._process = os.getpid()
        _services.add(self._native)

    def submit(self, requests: Sequence[Any], outbox: Any, more: bool = False) -> list[int]:
        """Native requests, whose events go to the native outbox; their ids. more: others follow at
        once, for which an engine at rest waits until `begin`."""
        if self._closed:
            raise InvalidError(CLOSED)
        return list(self._native.submit(requests, outbox, more))

    def begin(self) -> None:
        """An engine at rest begins with what was submitted."""
        self._native.begin()

    def cancel(self, request: int) -> None:
        """Ends a request within a step, if it has not ended; no event tells of it."""
        self._native.cancel(request)

    def open(self, capacity: int, prompt: Sequence[int] = ()) -> tuple[int, int]:
        """A sequence of up to `capacity` positions for the engine's own calls, and how many tokens
        of `prompt` it holds. Waits for room that others will give back; CapacityError if only
        sequences of this thread are in the way."""

        def take() -> tuple[int, int]:
            sequence, cached = self._native.open(prompt, capacity)
            self._holders[sequence] = threading.get_ident()
            return sequence, cached

        return self._with_room(take)

    def close(self, sequence: int) -> None:
        """Closes a sequence that was opened."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._holders.pop(sequence, None)
            self._native.close(sequence)
            self._changed.notify_all()

    def clear(self) -> None:
        """Gives up what is kept."""
        self._native.clear()

    @property
    def kept(self) -> int:
        """How many prefixes are kept, of which none begins with another."""
        return int(self._native.kept)

    def save(
        self, tokens: Sequence[int], path: str, metadata: str, progress: Progress | None
    ) -> int:
        """Writes what is kept of `tokens` to a file; how many that are."""
        return int(self._native.save(tokens, path, metadata, progress))

    def load(self, path: str, progress: Progress | None) -> tuple[list[int], str]:
        """Keeps what a file holds: its tokens and the metadata."""
        tokens, metadata = self._with_room(lambda: self._native.load(path, progress))
        return list(tokens), str(metadata)

    def exclusively(self, work: Callable[[], T]) -> T:
        """Runs `work` once every open request has ended; others wait."""
        results: list[T] = []
        while self._native.wait_for_room(PATIENCE_S):
            pass
        self._native.exclusively(lambda: results.append(work()))
        return results[0]

    def stats(self) -> dict[str, float]:
        """running, waiting, steps, tokens, guessed_tokens, accepted_tokens, saved_s,
        kv_blocks_used, kv_blocks_total, kv_blocks_moved, parked, preemptions, moves_far,
        moves_near, far_rows; steps, and predicted_s and measured_s where the plan has tables, of
        each mode: near_steps, ...; once a mixture's experts ran on the CPU, experts_read and
        experts_expected."""
        return dict(self._native.stats)

    def check(self) -> None:
        """Raises what the last failed step failed with, if one did."""
        self._native.check()

    def pace(self, step_target_s: float) -> None:
        """Sets what a step that decodes for a streamed request may take, as far as prompts that it
        computes beside make it longer; 0: 2.25 times one without prompts in which all that run
        decode, at least 50 ms."""
        self._native.pace(step_target_s)

    def drain(self) -> None:
        """Refuses what is submitted from now on."""
        self._native.drain()

    def end(self) -> None:
        """Likewise; who waits for room is refused, and what is kept is closed."""
        self._closed = True
        if os.getpid() == self._process:
            self._native.refuse_waiting(CLOSED)
        self._native.clear()

    def stop(self, grace_s: float) -> None:
        """Drains, waits so long for what is open, ends that with an error."""
        self._native.stop(grace_s)

    def _with_room(self, take: Callable[[], T]) -> T:
        me = threading.get_ident()
        self.engine.check_process()  # before a lock that nobody may be there to give back
        while not self._closed:
            with self._changed:
                busy = self._busy()
                others = any(thread != me for thread in self._holders.values())
                try:
                    return take()
                except CapacityError:
                    if not (busy or others or self._busy()):
                        raise
                if others:
                    self._changed.wait(PATIENCE_S)
            if not others:
                self._native.wait_for_room(PATIENCE_S)
        raise InvalidError(CLOSED)

    def _busy(self) -> bool:
        stats = self._native.stats
        return bool(stats["running"] + stats["waiting"])


def native_request(job: Job, streamed: bool) -> Any:
    """A job as the runtime takes it; streamed: whether somebody reads its tokens as they come."""
    return request_of(
        job.tokens, job.max_tokens, job.stop_tokens, job.sampling, job.constraint, streamed=streamed
    )


def request_of(
    tokens: Sequence[int],
    max_tokens: int,
    stop_tokens: Sequence[int],
    sampling: SamplingParams,
    constraint: Any = None,
    client: int = 0,
    streamed: bool = True,
) -> Any:
    """A request of the runtime; sampling: resolved. constraint: see helm.text.structured. client:
    whose request it is. streamed: whether somebody reads its tokens as they come."""
    from helm import _helm
    from helm.text.structured import Constraint

    if constraint is not None and not isinstance(constraint, Constraint):
        raise InvalidError(
            f"[generate] constraint must be one of helm.text.structured, got {shown(constraint)}"
        )
    native: Any = _helm.Request  # whose types say that the sampling is resolved
    return native(
        prompt=tokens,
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=list((sampling.logit_bias or {}).items()),
        constraint=None if constraint is None else constraint.start(),
        priority=sampling.priority,
        key=client,
        streamed=streamed,
    )
