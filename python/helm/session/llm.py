"""The Python API: a loaded model that turns prompts into text; no pricing, no parsing of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from helm.base.arguments import check_call, check_flag, token_ids
from helm.base.familiar import named
from helm.base.progress import Progress, progress_bar
from helm.compiler.kv_options import PAGE_TOKENS
from helm.errors import InvalidError
from helm.machine.profile import Profile
from helm.session.calls import Call, TextStream, run
from helm.session.host_memory import check_results, logits_array
from helm.session.loaded_llm import LoadedLLM
from helm.session.open import AnyTokenizer, LoadedModel, load_from_torch, load_model
from helm.session.options import Measuring, TorchKeywords, load_options
from helm.session.saved_kv import SavedKV, file_name, from_metadata, to_metadata
from helm.session.service import CLOSED, Service
from helm.session.speculation import choose_speculation, draft_named
from helm.text.completion import Completion
from helm.text.prompts import ChatKeywords, Job, Prompt, Prompts, Template, split_prompts
from helm.text.sampling import SamplingKeywords, SamplingParams, sampling_params

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from helm.measure.benchmark import Load, Report


class LLM(LoadedLLM):
    """A model ready to generate.

    model: a local folder, a GGUF file, a Hugging Face id, or None for the small bundled model. An
    id may name a GGUF file of a repository behind a colon, or a word of its name: "id:Q4_K_M".
    revision: branch, tag or commit of a Hugging Face id.
    tokenizer: a folder or a Hugging Face id, whose tokenizer is used instead of the model's own.
    context: positions a sequence may have, prompt and output; None: the model's own limit, or with
    an accelerator or a profile 4096, or what prompt_tokens and output_tokens take.
    max_sequences: prompts generating together at most.
    dtype: how weights are held, "auto" (as stored), "f32", "f16" or "bf16"; "q8" or "q4" rounds
    matrices to 8 bits or, but for embeddings, head and small ones, to 4; "fit" takes the first of
    "auto", "q8" and "q4" that fits, and a notice of the plan says which.
    kv_dtype: the same for the KV cache, or "i8", which takes about half of 16 bit.
    page_tokens: positions per KV page, 16 or more; None: 128, or 256 or 512 where those are
    predicted to be faster.
    policy: how layers share an accelerator and the CPU: each lies on one of them
    ("layer-partition"), some are cut and both compute them at once ("cut"), or "auto", whichever
    is predicted faster. Policies that others published are planned, but not executed; see
    `helm.study`.
    kv_overflow: how decode reaches KV pages that an accelerator has no room for: they visit it
    ("stream"), the "cpu" attends to them, or "auto", whichever is predicted faster.
    kv_vram_bytes: memory there that KV pages may take at most. watermark: once more than this
    share of that is in use (0.8), the oldest pages leave for host memory.
    threads: always so many; None: as planned for this machine, fewer beside busy programs.
    prefix_cache: whether the KV of prompts that begin alike is computed once, within a call and for
    later ones; what is kept for those lies in pages that no other call wants.
    speculate: whether tokens that repeat earlier text are guessed and computed several a step, as
    many as pay by what steps took; the tokens are the same. "ngram"; "off"; "auto": "ngram" where
    they are the same to the bit, else "off". Or a smaller model with the same vocabulary that
    guesses, named as `model` is, an id as owner/name; it takes its part of the host's memory first.
    `stats["speculation"]` says which, and why.
    weights: "copied" to huge pages; "mapped" from the files, which starts at once and shares the
    page cache; "compressed", bf16 in 12 bits per weight, exactly, which takes a quarter less memory
    and is faster in decode where memory bounds it (after DFloat11, Zhang et al. 2025, with codes of
    one length), slower where computing does, as it may for a `batch` of several; or "auto", what
    takes less time in all by this machine's profile, or, while it has none, by a short measurement
    and the rates of a common machine. expected_tokens: output tokens until the LLM is closed, by
    which "auto" decides; None: those of ten answers.
    copies: folders, or GGUF files, with copies of the model's files on other drives. What memory
    does not hold is read from all of them at once in every step.
    progress: called with (done_bytes, total_bytes) while weights load; may raise to cancel. True or
    False: whether there is a progress bar; None: on a terminal and in a notebook.
    memory_bytes, vram_bytes: memory of the host and of the accelerator that the model may take at
    most, less than is free.
    device: the accelerator to share the model with: "cuda", "cuda:N", or a simulated one as
    "sim:vram=2GiB,link=16GB/s"; "cpu" for none. None: the CUDA device if there is one, else none.
    profile: a machine's rates, by which units are placed: a Profile, a preset's name or a file;
    None: this machine's, which the first use of an accelerator measures for 10 to 15 s. It never
    says how much memory there is.
    prompt_tokens, output_tokens, batch, objective: the work that the placement makes fastest:
    "total" time, "decode", "ttft", "throughput", or "serve", for max_sequences requests that come
    and go. KV pages are kept for `batch` full contexts.
    measuring: called with (what, share done) while the machine is measured; None logs one line.

    Raises HelmError subclasses that say what was found and what to do, DeviceError for a device
    that cannot be had. Several LLM objects may live in one process, each within what the others
    leave of the memory; one may be used from several threads, but not in forked children.
    """

    @named("load")
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        context: int | None = None,
        max_sequences: int = 8,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        threads: int | None = None,
        page_tokens: int | None = PAGE_TOKENS,
        policy: str = "auto",
        kv_overflow: str = "auto",
        kv_vram_bytes: int | None = None,
        watermark: float | None = None,
        prefix_cache: bool = True,
        speculate: str | os.PathLike[str] = "auto",
        weights: str = "auto",
        copies: Sequence[str | os.PathLike[str]] = (),
        expected_tokens: int | None = None,
        progress: Progress | bool | None = None,
        memory_bytes: int | None = None,
        device: str | None = None,
        vram_bytes: int | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        batch: int = 1,
        objective: str = "total",
        measuring: Measuring | None = None,
    ) -> None:
        options = dict(locals())
        check_flag(prefix_cache, "[load] prefix_cache")
        draft = draft_named(speculate)
        with progress_bar(progress, "loading weights") as report:
            loaded = load_model(model, revision, load_options(options, report), tokenizer, draft)
        self._start(loaded, prefix_cache, speculate)

    @classmethod
    @named("from_torch", TorchKeywords)
    def from_torch(
        cls,
        module: Any,
        *,
        tokenizer: AnyTokenizer | None = None,
        **options: Unpack[TorchKeywords],
    ) -> LLM:
        """From a transformers model in memory: its config and its state dict.

        Contiguous CPU tensors of the planned dtype are shared, not copied: the module must not be
        changed while the LLM is in use. Others are copied. `tokenizer` (transformers' own, a helm
        Tokenizer, or a folder with tokenizer.json) is needed only for text; token ids work without
        one. What lies on an accelerator is copied there. The other options are those of LLM(...),
        but for those that are about files: revision, weights and expected_tokens.
        """
        prefix_cache = options.pop("prefix_cache", True)
        check_flag(prefix_cache, "[load] prefix_cache")
        speculate = options.pop("speculate", "auto")
        draft = draft_named(speculate)
        with progress_bar(options.pop("progress", None), "loading weights") as report:
            loaded = load_from_torch(module, tokenizer, load_options(options, report), draft)
        self = cls.__new__(cls)
        self._start(loaded, prefix_cache, speculate)
        return self

    def _start(self, loaded: LoadedModel, prefix_cache: bool, speculate: Any) -> None:
        self._hold(loaded)
        self._speculation = choose_speculation(speculate, self._engine, loaded.draft)
        drafter = self._speculation.drafter()
        self._service: Service | None = Service(self._engine, prefix_cache, drafter)
        self._prompts = Prompts(
            loaded.tokenizer, loaded.defaults, self.context, loaded.longest, self.vocab_size
        )
        self._last: list[int] = []  # prompt and output of the last call

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is one prompt, though a sequence, too
        self,
        prompts: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **overrides: Unpack[SamplingKeywords],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **overrides: Unpack[SamplingKeywords],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **overrides: Unpack[SamplingKeywords],
    ) -> Completion | list[Completion]:
        """Continue one prompt or many.

        prompts: text, token ids, or a list of either; many run together. Sampling parameters are
        those of SamplingParams, given as an object, as keywords, or both (keywords win). Text
        gets the tokenizer's special tokens, token ids are taken as they are. Returns a Completion
        for one prompt, a list in the same order for a list. Nothing starts if one prompt is bad;
        one of a list that fails later has finish_reason "error" and the message in `error`, and
        the others are complete. Ctrl-C (KeyboardInterrupt) ends it and leaves the LLM usable.
        progress: whether there is a bar; None: of several prompts, where somebody watches.
        """
        service = self._open_service()
        params = sampling_params(sampling, overrides)
        single, many = split_prompts(prompts)
        jobs = [self._prompts.job(prompt, i, params) for i, prompt in many]
        check_results(jobs, self.vocab_size)
        wanted = False if progress is None and len(jobs) == 1 else progress
        with progress_bar(wanted, "generating", "prompt", "generate") as report:
            results = run(service, self.tokenizer, jobs, report)
        for job, (completion, failure) in zip(jobs, results, strict=True):
            if single and failure is not None:
                raise failure
            if failure is None:
                self._last = job.tokens + completion.tokens
        return results[0][0] if single else [completion for completion, _ in results]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **overrides: Unpack[SamplingKeywords],
    ) -> TextStream:
        """Continue one prompt; an iterator of TextChunk(text, tokens, finish_reason).

        The last chunk has the finish reason and the whole `completion`. Leaving the loop early
        ends the generation as soon as the stream is closed or dropped.
        """
        self._open_service()
        params = sampling_params(sampling, overrides)
        single, many = split_prompts(prompt)
        if not single:
            raise InvalidError("[stream] takes one prompt, got a list; generate() takes many")
        return self._stream(self._prompts.job(many[0][1], None, params))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Completion:
        """The assistant's next message of a conversation, after the model's chat template.

        messages: [{"role": "system" | "user" | "assistant", "content": text}, ...]; a content may
        be a list of {"type": "text", "text": text}. "tokens" of a message, as a Completion has
        them, are used for its content where they say that. Options: those of chat_stream().
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
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **overrides: Unpack[SamplingKeywords],
    ) -> TextStream:
        """`chat` as a stream of TextChunks.

        tools, template_variables (a dict): what the chat template is given beside the messages.
        chat_template: one of `tokenizer.chat_templates`; None: "tool_use" with tools, where there
        is one, else "default". continue_final_message: the text goes on with the last message.
        """
        self._open_engine()
        params = sampling_params(sampling, overrides)
        template = Template(tools, template_variables, chat_template, continue_final_message)
        return self._stream(self._prompts.chat_job(messages, params, template))

    def _stream(self, job: Job) -> TextStream:
        check_results([job], self.vocab_size)

        def keep(completion: Completion) -> None:
            self._last = job.tokens + completion.tokens

        return TextStream(Call(self._open_service(), self.tokenizer, [job]), keep)

    def _open_service(self) -> Service:
        self._open_engine()
        if self._service is None:
            raise InvalidError(CLOSED)
        return self._service

    def save_kv(
        self,
        path: str | os.PathLike[str],
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Writes the KV cache of the last call to a file: of its prompt and output, for load_kv().

        messages: the conversation, to get it back with the cache. progress: called with
        (done_bytes, total_bytes), may raise to cancel; it may end streams of this LLM, which is at
        work, but not generate. A save that fails leaves the file as it was; one that succeeds
        replaces it, links followed, and keeps its mode. A new file is readable by its owner alone.
        InvalidError for a path that names no file. Returns how many tokens were saved; fewer than
        the call had, less the last, which is never cached, if other calls needed the room.
        """
        service = self._open_service()
        if not self._last:
            raise InvalidError("[kv] nothing to save; generate or chat first")
        check_call(progress, "[kv] progress", "progress(done, total)")
        name, metadata = file_name(path), to_metadata(self._last, messages)
        return service.save(self._last, name, metadata, progress)

    def load_kv(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> SavedKV:
        """Takes up what save_kv() wrote: prompts that begin with its tokens need not compute them.

        Pages may have another size than those that were saved. Raises InvalidError, with the
        reason, for a file of another model, other weights or dtype, of another format, and for one
        that is damaged, which its checksums show.
        """
        service = self._open_service()
        check_call(progress, "[kv] progress", "progress(done, total)")
        name = file_name(path)
        tokens, metadata = service.load(name, progress)
        saved = from_metadata(len(tokens), metadata, name)
        self._last = saved.tokens
        return saved

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position, float32 [len(tokens), vocab_size]; row i predicts token i+1.
        OutOfMemoryError, before it starts, where memory does not hold them."""
        import numpy

        service, engine = self._open_service(), self._open_engine()
        most = self.plan.limits.step_tokens
        ids = self._prompts.checked(token_ids(tokens, "tokens"), "tokens")
        rows = logits_array(len(ids), self.vocab_size, most)
        sequence, _ = service.open(len(ids))
        try:
            for begin in range(0, len(ids), most):  # Ctrl-C has its chance between two steps
                step = numpy.asarray(ids[begin : begin + most], numpy.int32)
                rows[begin : begin + most] = engine.forward(sequence, step, all=True)
        finally:
            service.close(sequence)
        return rows

    def benchmark(
        self,
        load: Load,
        rounds: int = 5,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> Report:
        """Measures prefill and decode of `load` (helm.measure.benchmark.Load); other threads wait.

        progress: called with (rounds done, rounds). Raises InvalidError for a load beyond the
        plan's context or sequences.
        """
        from helm.measure.benchmark import measure

        service = self._open_service()

        def alone() -> Report:
            service.clear()
            return measure(service.engine, self.plan, load, rounds, progress)

        return service.exclusively(alone)

    def close(self) -> None:
        """Frees the weights and the KV cache, once open streams have ended too. Further calls
        raise InvalidError, as do those that wait for room."""
        service, self._service, self._engine = self._service, None, None
        if service is not None:
            service.end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
