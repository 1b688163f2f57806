"""What users give as prompts, checked against a model and made into jobs; runs nothing."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helm.base.arguments import check_flag, items_of, shown, token_ids
from helm.errors import CapacityError, InvalidError, TokenizerError
from helm.text.answer_tokens import conversation_tokens
from helm.text.chat_template import check_messages
from helm.text.generation_defaults import GenerationDefaults
from helm.text.sampling import SamplingKeywords, SamplingParams
from helm.text.structured import Constraint, constraint_of
from helm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
# Of a chat template, with arguments of their own.
_OWN_VARIABLES = ("messages", "tools", "template", "continue_final_message", "self")


class ChatKeywords(SamplingKeywords, total=False):
    """What LLM.chat takes by name."""

    tools: Sequence[Any] | None
    template_variables: Mapping[str, Any] | None
    chat_template: str | None
    continue_final_message: bool


@dataclass(frozen=True)
class Template:
    """What a chat template is given beside the messages, see LLM.chat_stream; checked here."""

    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] | None = None
    name: str | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        variables = {} if self.variables is None else self.variables
        if not isinstance(variables, Mapping) or not all(isinstance(n, str) for n in variables):
            raise InvalidError(
                f"[chat] template_variables must be a dict of names, got {shown(variables)}"
            )
        for name in _OWN_VARIABLES:
            if name in variables:
                raise InvalidError(f"[chat] template_variables cannot set {name!r}; leave it out")
        if self.tools is not None and not isinstance(self.tools, (list, tuple)):
            raise InvalidError(f"[chat] tools must be a list, got {type(self.tools).__name__}")
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidError(
                f"[chat] chat_template must be a template's name, got {shown(self.name)}"
            )
        check_flag(self.continues, "[chat] continue_final_message")
        if self.continues and variables.get("add_generation_prompt"):
            raise InvalidError(
                "[chat] continue_final_message goes on with the last message, "
                "add_generation_prompt begins a new one; give one of them"
            )

    def render(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation; "tokens" of messages are not for templates."""
        check_messages(messages)
        return tokenizer.render_chat(
            [{k: v for k, v in message.items() if k != "tokens"} for message in messages],
            tools=self.tools,
            template=self.name,
            continue_final_message=self.continues,
            **(self.variables or {}),
        )

    def tokens(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a conversation; messages with "tokens" keep them."""
        return conversation_tokens(tokenizer, messages, lambda m: self.render(tokenizer, m))


@dataclass(frozen=True)
class Job:
    """One prompt to continue.

    tokens: the whole context so far, checked to fit the model. sampling: resolved.
    max_tokens: new tokens that fit the context. stop_tokens: ids that end the text.
    sequence, cached: an open sequence and how many leading tokens it holds; -1: a new one.
    seeded_text: whether the text continues the prompt's (its leading space is kept) or stands
    alone, as a chat message does. constraint: the grammar that the text obeys.
    """

    tokens: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_tokens: list[int]
    sequence: int = -1
    cached: int = 0
    seeded_text: bool = True
    constraint: Constraint | None = None

    @property
    def capacity(self) -> int:
        """Positions the job may come to hold: the last sampled token is never cached."""
        return len(self.tokens) + self.max_tokens - 1


@dataclass(frozen=True)
class Prompts:
    """A model as far as prompts are concerned. context: positions of a sequence; longest: what it
    could be raised to."""

    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    context: int
    longest: int
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
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, template: Template
    ) -> Job:
        """To answer a conversation, or go on with it, after the model's chat template."""
        if self.tokenizer is None:
            raise TokenizerError(
                "[chat] this model has no tokenizer; put tokenizer.json into its folder, or give "
                "from_torch() one"
            )
        tokens = template.tokens(self.tokenizer, messages)
        job = self._job(self.checked(tokens, "the conversation"), params, chat=True)
        return dataclasses.replace(job, seeded_text=template.continues)

    def tokens_job(
        self, tokens: list[int], params: SamplingParams, chat: bool, continues: bool
    ) -> Job:
        """To continue token ids. chat: whether they are a conversation's; continues: whether the
        text goes on with theirs."""
        where = "the conversation" if chat else "the prompt"
        job = self._job(self.checked(tokens, where), params, chat)
        return dataclasses.replace(job, seeded_text=continues)

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
            remedy = "" if len(ids) > self.longest else " or raise context="
            raise CapacityError(
                f"[generate] {where} has {len(ids)} tokens, the context holds {self.context}; "
                f"shorten the prompt{remedy}"
            )
        return ids

    def _job(self, tokens: list[int], params: SamplingParams, chat: bool = False) -> Job:
        sampling = params.resolve(dataclasses.asdict(self.defaults))
        room = self.context - len(tokens) + 1  # the last sampled token is never cached
        wanted = sampling.max_tokens if isinstance(sampling.max_tokens, int) else room
        stops = set(sampling.stop_token_ids or ())
        ends = self.defaults.eos_token_ids
        self._check_biases(sampling)
        if not sampling.ignore_eos:
            stops.update(ends)
            eos = self.tokenizer.eos_token_id if chat and self.tokenizer else None
            stops.update(() if eos is None else (eos,))
        return Job(
            tokens=tokens,
            sampling=sampling,
            max_tokens=min(wanted, room),
            stop_tokens=sorted(stops),
            seeded_text=not chat,
            constraint=constraint_of(sampling, self.tokenizer, self.vocab_size, ends),
        )

    def _check_biases(self, sampling: SamplingParams) -> None:
        for token in sampling.logit_bias or ():
            if token >= self.vocab_size:
                raise InvalidError(
                    f"[generate] logit_bias names token {token}, outside the model's vocabulary of "
                    f"{self.vocab_size} (ids 0 to {self.vocab_size - 1})"
                )


def split_prompts(prompts: Any) -> tuple[bool, list[tuple[int | None, Any]]]:
    """Whether it is one prompt, and the prompts with their index in a list."""
    if isinstance(prompts, str):
        return True, [(None, prompts)]
    items = items_of(prompts)
    if items is None:
        raise InvalidError(
            f"[generate] a prompt is text or a list of token ids, got {type(prompts).__name__}"
        )
    if not items:
        raise InvalidError("[generate] the prompt is empty; give text or at least one token id")
    if all(isinstance(p, numbers.Integral) for p in items):
        return True, [(None, items)]
    return False, list(enumerate(items))
