"""What users give as prompts, checked against a model and made into jobs; runs nothing."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helm.arguments import shown, token_ids
from helm.batch import Job
from helm.config import GenerationDefaults
from helm.errors import CapacityError, InvalidError, TokenizerError
from helm.sampling import SamplingParams
from helm.tokenizer import Tokenizer

Prompt = str | Sequence[int]
_OWN_VARIABLES = {"messages", "tools", "self"}  # of a chat template, with arguments of their own


@dataclass(frozen=True)
class Prompts:
    """A model as far as prompts are concerned. context: positions of a sequence."""

    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    context: int
    vocab_size: int

    def job(self, prompt: Prompt, index: int | None, params: SamplingParams) -> Job:
        """To continue text or token ids; index: its place in a list."""
        where = "the prompt" if index is None else f"prompt {index}"
        if not isinstance(prompt, str):
            return self._job(self.checked(token_ids(prompt, where), where), params)
        if self.tokenizer is None:
            raise TokenizerError(
                "[generate] this model has no tokenizer; give token ids, put tokenizer.json into "
                "its folder, or give from_torch() a tokenizer"
            )
        if not prompt:
            raise InvalidError(f"[generate] {where} is empty; give at least one character")
        return self._job(self.checked(self.tokenizer.encode(prompt), where), params)

    def chat_job(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
    ) -> Job:
        """To answer a conversation, after the model's chat template."""
        variables = {} if variables is None else variables
        if not isinstance(variables, Mapping) or not all(isinstance(n, str) for n in variables):
            raise InvalidError(
                f"[chat] template_variables must be a dict of names, got {shown(variables)}"
            )
        for name in _OWN_VARIABLES & variables.keys():
            raise InvalidError(f"[chat] template_variables cannot set {name!r}; leave it out")
        if self.tokenizer is None:
            raise TokenizerError(
                "[chat] this model has no tokenizer; put tokenizer.json into its folder, or give "
                "from_torch() one"
            )
        text = self.tokenizer.render_chat(messages, tools=tools, **variables)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return self._job(self.checked(tokens, "the conversation"), params, chat=True)

    def checked(self, ids: list[int], where: str) -> list[int]:
        """`ids`, if they are some, of the vocabulary and within the context."""
        if not ids:
            raise InvalidError(f"[generate] {where} has no tokens; give at least one")
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise InvalidError(
                    f"[generate] {where}: token {position} is {shown(token)}, outside the model's "
                    f"vocabulary of {self.vocab_size} (ids 0 to {self.vocab_size - 1})"
                )
        if len(ids) > self.context:
            raise CapacityError(
                f"[generate] {where} has {len(ids)} tokens, the context holds {self.context}; "
                "shorten the prompt or raise the context (--context)"
            )
        return ids

    def _job(self, tokens: list[int], params: SamplingParams, chat: bool = False) -> Job:
        sampling = params.resolve(dataclasses.asdict(self.defaults))
        room = self.context - len(tokens) + 1  # the last sampled token is never cached
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        stops = set(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stops.update(self.defaults.eos_token_ids)
            eos = self.tokenizer.eos_token_id if chat and self.tokenizer else None
            stops.update(() if eos is None else (eos,))
        return Job(
            tokens=tokens,
            sampling=sampling,
            max_tokens=min(wanted, room),
            stop_tokens=sorted(stops),
            seeded_text=not chat,
        )


def split_prompts(prompts: Any) -> tuple[bool, list[tuple[int | None, Any]]]:
    """Whether it is one prompt, and the prompts with their index in a list."""
    if isinstance(prompts, str):
        return True, [(None, prompts)]
    if hasattr(prompts, "tolist"):  # numpy array or torch tensor
        prompts = prompts.tolist()
    none = (bytes, bytearray, memoryview, Mapping)
    if isinstance(prompts, none) or not isinstance(prompts, Sequence):
        raise InvalidError(
            f"[generate] a prompt is text or a list of token ids, got {type(prompts).__name__}"
        )
    if not prompts:
        raise InvalidError("[generate] the prompt is empty; give text or at least one token id")
    if all(isinstance(p, numbers.Integral) for p in prompts):
        return True, [(None, prompts)]
    return False, list(enumerate(prompts))
