"""The Python API: a loaded model that turns prompts into text; no pricing, no parsing of files."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

from helm.batch import Batch, Job, TextStream
from helm.completion import Completion
from helm.errors import CapacityError, InvalidError, TokenizerError
from helm.kv_options import PAGE_TOKENS, KvOptions
from helm.loading import LoadedModel, load_from_torch, load_model
from helm.local_plan import LoadOptions, Measuring, Progress, units_by_device
from helm.sampling import SamplingParams, sampling_params
from helm.sequences import Sequences
from helm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from helm.benchmark import Load, Report
    from helm.config import ModelConfig
    from helm.plan import Plan
    from helm.profile import Profile

Prompt = str | Sequence[int]
ADVANCE_S = 0.05  # how long native code runs between two chances for Ctrl-C


class LLM:
    """A model ready to generate.

    model: a local folder, a Hugging Face id, or None for the small bundled model.
    revision: branch, tag or commit of a Hugging Face id.
    context: positions a sequence may have, prompt and output; None: the model's own limit, or with
    an accelerator or a profile 4096, or what prompt_tokens and output_tokens take.
    max_sequences: prompts generating together at most.
    dtype: how weights are held, "auto" (as stored), "f32", "f16" or "bf16".
    kv_dtype: the same for the KV cache, or "i8", which takes about half of 16 bit.
    page_tokens: positions per KV page, 16 or more.
    kv_overflow: how decode reaches KV pages that an accelerator has no room for: they "stream" to
    it, the "cpu" attends to them, or "auto", whichever is predicted faster. kv_vram_bytes: memory
    there that KV pages may take at most. watermark: once more than this share of that is in use
    (0.8), the oldest pages leave for host memory.
    threads: None: as planned for this machine.
    weights: "copied" to huge pages, which decode reads fastest, or "mapped" from the files, which
    starts at once and shares the page cache.
    progress: called with (done_bytes, total_bytes) while weights load; may raise to cancel.
    memory_bytes, vram_bytes: memory of the host and of the accelerator that the model may take at
    most, less than is free.
    device: the accelerator to share the model with: "cuda", "cuda:N", or a simulated one as
    "sim:vram=2GiB,link=16GB/s"; "cpu" for none. None: the CUDA device if there is one, else none.
    profile: a machine's rates (helm.profile.load_profile), by which units are placed; None: this
    machine's, which the first use of an accelerator measures for some 15 s. It never says how much
    memory there is.
    prompt_tokens, output_tokens, batch, objective: the work that the placement makes fastest:
    "total" time, "decode", "ttft" or "throughput". KV pages are kept for `batch` full contexts.
    measuring: called with (what, share done) while the machine is measured; None logs one line.

    Raises HelmError subclasses that say what was found and what to do, DeviceError for a device
    that cannot be had. Several LLM objects may live in one process, and one may be used from
    several threads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        context: int | None = None,
        max_sequences: int = 8,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        threads: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        kv_overflow: str = "auto",
        kv_vram_bytes: int | None = None,
        watermark: float | None = None,
        weights: str = "copied",
        progress: Progress | None = None,
        memory_bytes: int | None = None,
        device: str | None = None,
        vram_bytes: int | None = None,
        profile: Profile | None = None,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        batch: int = 1,
        objective: str = "total",
        measuring: Measuring | None = None,
    ) -> None:
        options = LoadOptions(
            context=context,
            max_sequences=max_sequences,
            dtype=dtype,
            kv_dtype=kv_dtype,
            threads=threads,
            page_tokens=page_tokens,
            kv=KvOptions(kv_overflow, kv_vram_bytes, watermark),
            weights=weights,
            progress=progress,
            memory_bytes=memory_bytes,
            device=device,
            vram_bytes=vram_bytes,
            profile=profile,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            batch=batch,
            objective=objective,
            measuring=measuring,
        )
        self._start(load_model(model, revision, options))

    @classmethod
    def from_torch(
        cls,
        module: Any,
        *,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        context: int | None = None,
        max_sequences: int = 8,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        threads: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        kv_overflow: str = "auto",
        kv_vram_bytes: int | None = None,
        watermark: float | None = None,
        progress: Progress | None = None,
        memory_bytes: int | None = None,
        device: str | None = None,
        vram_bytes: int | None = None,
        profile: Profile | None = None,
    ) -> LLM:
        """From a transformers model in memory: its config and its state dict.

        Contiguous CPU tensors of the planned dtype are shared, not copied: the module must not be
        changed while the LLM is in use. Others are copied. `tokenizer` (a Tokenizer, or a folder
        with tokenizer.json) is needed only for text; token ids work without one. What lies on an
        accelerator is copied there. The other options are those of LLM(...).
        """
        options = LoadOptions(
            context=context,
            max_sequences=max_sequences,
            dtype=dtype,
            kv_dtype=kv_dtype,
            threads=threads,
            page_tokens=page_tokens,
            kv=KvOptions(kv_overflow, kv_vram_bytes, watermark),
            progress=progress,
            memory_bytes=memory_bytes,
            device=device,
            vram_bytes=vram_bytes,
            profile=profile,
        )
        self = cls.__new__(cls)
        self._start(load_from_torch(module, tokenizer, options))
        return self

    def _start(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._engine: Any = loaded.engine
        loaded.engine = None
        self._sequences = Sequences(self._engine, self.context)

    @property
    def plan(self) -> Plan:
        """What runs where, and the memory it takes."""
        return self._loaded.plan

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        return self._loaded.config

    @property
    def folder(self) -> Path | None:
        """Where the checkpoint lies; None for a module in memory."""
        return self._loaded.folder

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model without one (from_torch)."""
        return self._loaded.tokenizer

    @property
    def name(self) -> str:
        """The folder's name, the Hugging Face id or the module's class."""
        return self._loaded.name

    @property
    def context(self) -> int:
        """Positions a sequence may have, prompt and output together."""
        return self.plan.limits.context

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.plan.model.vocab_size

    @property
    def stats(self) -> dict[str, Any]:
        """The engine's own account: bytes, threads, kernel tier, load time.

        `devices` lists the CPU and, if the plan uses one, the accelerator: what it is, which
        `units` it holds ("embedding", "blocks 0-3", ...), and bytes by purpose. `predicted` is
        the plan's decode rate in tokens/s, None for a plan made without a profile.
        """
        stats = dict(self._open_engine().stats)
        held = units_by_device(self.plan)
        for use in stats["devices"]:
            use["units"] = held[use["device"]]
        prediction = self.plan.prediction
        stats["predicted"] = (
            None if prediction is None else prediction.predicted.decode_tokens_per_s
        )
        return stats

    @overload
    def generate(
        self,
        prompts: str | Sequence[int],
        sampling: SamplingParams | None = None,
        **overrides: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        **overrides: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | None = None,
        **overrides: Any,
    ) -> Completion | list[Completion]:
        """Continue one prompt or many.

        prompts: text, token ids, or a list of either; many run together. Sampling parameters are
        those of SamplingParams, given as an object, as keywords, or both (keywords win). Text
        gets the tokenizer's special tokens, token ids are taken as they are. Returns a Completion
        for one prompt, a list in the same order for a list. Nothing starts if one prompt is bad.
        Ctrl-C (KeyboardInterrupt) ends it and leaves the LLM usable.
        """
        engine = self._open_engine()
        params = sampling_params(sampling, overrides)
        single, many = _split_prompts(prompts)
        jobs = [self._job(self._prompt_tokens(prompt, i), params) for i, prompt in many]
        with self._sequences.batch(max(job.capacity for job in jobs)):
            batch = Batch(engine, self.tokenizer, jobs)
            try:
                while not batch.done:
                    for _ in batch.advance(ADVANCE_S):
                        pass
            finally:
                batch.cancel()
        completions = [batch.completion(i) for i in range(len(jobs))]
        return completions[0] if single else completions

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **overrides: Any
    ) -> TextStream:
        """Continue one prompt; an iterator of TextChunk(text, tokens, finish_reason).

        The last chunk has the finish reason and the whole `completion`. Leaving the loop early
        ends the generation as soon as the stream is closed or dropped.
        """
        self._open_engine()
        params = sampling_params(sampling, overrides)
        single, many = _split_prompts(prompt)
        if not single:
            raise InvalidError("[stream] takes one prompt, got a list; generate() takes many")
        job = self._job(self._prompt_tokens(many[0][1], None), params)
        sequence = self._sequences.open(job.capacity)
        return self._start_stream(
            dataclasses.replace(job, sequence=sequence),
            lambda _: self._sequences.close(sequence),
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """The assistant's next message of a conversation, after the model's chat template.

        messages: [{"role": "system" | "user" | "assistant", "content": text}, ...]. The KV cache
        of the last conversation is kept: what the new prompt shares with it is not computed
        again. Options: sampling parameters, `tools` and `template_variables` (a dict).
        """
        with self.chat_stream(messages, sampling, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> TextStream:
        """`chat` as a stream of TextChunks."""
        self._open_engine()
        params = sampling_params(sampling, overrides)
        if self.tokenizer is None:
            raise TokenizerError("[chat] this model has no tokenizer; give one to from_torch()")
        text = self.tokenizer.render_chat(messages, tools=tools, **(template_variables or {}))
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        job = self._job(self._checked_tokens(tokens, "the conversation"), params, chat=True)
        kept = self._sequences.lease_chat(job.tokens, job.capacity)
        return self._start_stream(
            dataclasses.replace(job, sequence=kept.sequence, cached=len(kept.tokens)),
            lambda completion: self._sequences.settle(kept, tokens + completion.tokens),
        )

    def _start_stream(self, job: Job, on_close: Callable[[Completion], None]) -> TextStream:
        try:
            batch = Batch(self._open_engine(), self.tokenizer, [job])
        except BaseException:
            self._sequences.close(job.sequence)
            raise
        return TextStream(batch, on_close)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position, float32 [len(tokens), vocab_size]; row i predicts token i+1."""
        import numpy

        engine = self._open_engine()
        ids = self._checked_tokens(_token_ids(tokens, "tokens"), "tokens")
        sequence = self._sequences.open(len(ids))
        try:
            rows = engine.forward(sequence, numpy.asarray(ids, dtype=numpy.int32), all=True)
        finally:
            self._sequences.close(sequence)
        return cast("npt.NDArray[np.float32]", rows)

    def benchmark(
        self,
        load: Load,
        rounds: int = 5,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> Report:
        """Measures prefill and decode of `load` (helm.benchmark.Load); other threads wait.

        progress: called with (rounds done, rounds). Raises InvalidError for a load beyond the
        plan's context or sequences.
        """
        from helm.benchmark import measure

        engine = self._open_engine()
        with self._sequences.batch(1):
            self._sequences.drop_idle()
            return measure(engine, self.plan, load, rounds, progress)

    def close(self) -> None:
        """Frees the weights and the KV cache. Further calls raise InvalidError."""
        if self._engine is not None:
            self._sequences.drop_idle()
        self._engine = None
        self._sequences = Sequences(None, 0)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_engine(self) -> Any:
        if self._engine is None:
            raise InvalidError("[generate] this LLM is closed; make a new one")
        return self._engine

    def _prompt_tokens(self, prompt: Prompt, index: int | None) -> list[int]:
        where = "the prompt" if index is None else f"prompt {index}"
        if not isinstance(prompt, str):
            return self._checked_tokens(_token_ids(prompt, where), where)
        if self.tokenizer is None:
            raise TokenizerError(
                "[generate] this model has no tokenizer; give token ids, or a tokenizer to "
                "from_torch()"
            )
        if not prompt:
            raise InvalidError(f"[generate] {where} is empty; give at least one character")
        return self._checked_tokens(self.tokenizer.encode(prompt), where)

    def _checked_tokens(self, ids: list[int], where: str) -> list[int]:
        if not ids:
            raise InvalidError(f"[generate] {where} has no tokens; give at least one")
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise InvalidError(
                    f"[generate] {where}: token {position} is {token}, outside the model's "
                    f"vocabulary of {self.vocab_size} (ids 0 to {self.vocab_size - 1})"
                )
        if len(ids) > self.context:
            raise CapacityError(
                f"[generate] {where} has {len(ids)} tokens, the context holds {self.context}; "
                "shorten the prompt or raise the context (--context)"
            )
        return ids

    def _job(self, tokens: list[int], params: SamplingParams, chat: bool = False) -> Job:
        sampling = params.resolve(dataclasses.asdict(self._loaded.defaults))
        room = self.context - len(tokens) + 1  # the last sampled token is never cached
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        stops = set(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stops.update(self._loaded.defaults.eos_token_ids)
            eos = self.tokenizer.eos_token_id if chat and self.tokenizer else None
            stops.update(() if eos is None else (eos,))
        return Job(
            tokens=tokens,
            sampling=sampling,
            max_tokens=min(wanted, room),
            stop_tokens=sorted(stops),
            seeded_text=not chat,
        )


def _split_prompts(prompts: Any) -> tuple[bool, list[tuple[int | None, Any]]]:
    """Whether it is one prompt, and the prompts with their index in a list."""
    if isinstance(prompts, str):
        return True, [(None, prompts)]
    if hasattr(prompts, "tolist"):  # numpy array or torch tensor
        prompts = prompts.tolist()
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise InvalidError(
            f"[generate] a prompt is text or a list of token ids, got {type(prompts).__name__}"
        )
    if not prompts:
        raise InvalidError("[generate] the prompt is empty; give text or at least one token id")
    if all(isinstance(p, numbers.Integral) for p in prompts):
        return True, [(None, prompts)]
    return False, list(enumerate(prompts))


def _token_ids(tokens: Any, where: str) -> list[int]:
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if isinstance(tokens, (str, bytes, Mapping)) or not isinstance(tokens, Sequence):
        raise InvalidError(
            f"[generate] {where} must be text or a list of token ids, got {type(tokens).__name__}"
        )
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise InvalidError(f"[generate] {where}: {token!r} is not a token id (an integer)")
    return [int(token) for token in tokens]
