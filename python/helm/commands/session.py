"""A conversation and what is done with it: answered, gone on with, kept within the context."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from helm.commands import common, kv_files, template_options
from helm.commands.answer_view import view_of
from helm.commands.ending import Ending
from helm.commands.lines import say, say_error
from helm.errors import HelmError, InvalidError
from helm.text.answer_tokens import shown_tokens
from helm.text.chat_template import extended
from helm.text.prompts import Template
from helm.text.sampling import SamplingParams

if TYPE_CHECKING:
    from helm.session.llm import LLM
    from helm.text.completion import Completion

Messages = list[dict[str, Any]]
_LEAST_ROOM = 4  # an answer has at least this part of the context where older turns can give way
_ROOM_AGAIN = 2  # once they do, this part is free, so that several turns go by before the next time


class Session:
    """The messages so far. sampling, template: of the next answer. ending: may cut one short."""

    def __init__(
        self, llm: LLM, system: str | None, sampling: SamplingParams, template: Template,
        ending: Ending, quiet: bool = False, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.llm = llm
        self.sampling = sampling
        self.template = template
        self.ending = ending
        self.stopped = False  # whether Ctrl-C ended the last answer
        self._quiet = quiet
        self._verbose = verbose
        self._opening: Messages = []  # the system prompt, if it is ours and not the template's
        self._turns: Messages = []
        self._question: Messages = []  # the turns up to the last message that was answered
        self._again = 0  # how often it was answered before
        self._restored = 0  # tokens loaded from a file for the next answer
        self.system = system

    @property
    def system(self) -> str | None:
        """The system prompt; None: the template's."""
        return str(self._opening[0]["content"]) if self._opening else None

    @system.setter
    def system(self, text: str | None) -> None:
        self._opening = [{"role": "system", "content": text}] if text else []

    def check(self) -> None:
        """Refuses a model without a usable chat template before the first turn."""
        if self.llm.tokenizer is not None:
            probe = [*self._opening, {"role": "user", "content": "Hello"}]
            self.template.render(self.llm.tokenizer, probe)

    def clear(self) -> None:
        """Forgets all but the system prompt."""
        self._turns, self._question = [], []

    def restore(self, path: str) -> None:
        """Goes on with the conversation of a file."""
        saved = kv_files.load(self.llm, path, self._quiet)
        if saved.messages is None:
            raise InvalidError(
                f"[chat] {path} holds no conversation but a text; use helm-llm run --load-kv"
            )
        first = saved.messages[0]["role"] == "system"
        self._opening, self._turns = saved.messages[:first], saved.messages[first:]
        self._question = self._turns[:-1]
        self._restored = saved.cached

    def save(self, path: str) -> bool:
        """Writes the conversation to a file, or says why not; False when it failed."""
        if not self._turns:
            say("(nothing to save, the conversation has not begun)")
            return True
        try:
            kv_files.save(self.llm, path, self._quiet, [*self._opening, *self._turns])
        except HelmError as error:
            say_error(error)
            return False
        return True

    def answer(self, text: str) -> bool:
        """Answers a message; False when that failed."""
        self._question, self._again = [*self._turns, {"role": "user", "content": text}], 0
        return self._generate(self._question)

    def go_on(self) -> bool:
        """Continues the last answer; False when that failed."""
        if not self._turns:
            say("(nothing to go on with, the conversation has not begun)")
            return False
        return self._generate(self._turns, continues=True)

    def regenerate(self) -> bool:
        """Answers the last message anew; False when that failed."""
        if not self._question:
            say("(nothing to answer again, the conversation has not begun)")
            return False
        self._again += 1
        before = self._turns[-1:]
        done = self._generate(self._question)
        if done and not self.stopped and self._turns[-1:] == before:
            say("(the likeliest answer is the same; /set temperature 0.8 gives others)")
        return done

    def _generate(self, turns: Messages, continues: bool = False) -> bool:
        """Answers the last of `turns`, or goes on with it."""
        self.stopped = False
        sampling = self.sampling
        if sampling.seed is not None and self._again:
            sampling = dataclasses.replace(sampling, seed=(sampling.seed + self._again) % 2**64)
        try:
            kept = self._fitting(turns, continues)
            asked = [*self._opening, *kept]
            view = view_of(self.llm, self.template, asked, continues)
            stream = template_options.answer(self.llm, self.template, asked, sampling, continues)
        except HelmError as error:
            say_error(error)
            return False
        if left := len(_begins(turns)) - len(_begins(kept)):
            oldest = "oldest turn is" if left == 1 else f"{left} oldest turns are"
            say(f"(the context is full: the {oldest} left out)")
        failure = None
        try:
            with self.ending.interruptible():
                for chunk in stream:
                    view.write(chunk.text, chunk.tokens)
        except KeyboardInterrupt:
            self.stopped = True
        except HelmError as error:
            failure = error
        finally:
            stream.close()
            if failure is None:
                self._remember(kept, stream.completion, continues)
            view.end()
        if failure is not None:
            say_error(failure)
            return False
        self._sum_up(stream.completion)
        return True

    def _sum_up(self, completion: Completion) -> None:
        if self.stopped:
            say("(stopped)")
        elif completion.finish_reason == "length" and not self._quiet:
            used = completion.prompt_tokens + len(completion.tokens)
            limit = f"{len(completion.tokens):,} tokens"
            if used > self.llm.context:
                limit = f"the end of the context of {self.llm.context:,}"
            say(f"(the answer stops at {limit}; /continue goes on)")
        if self._verbose:
            say(common.summary_line(self.llm, completion, self._restored, context=True))
        self._restored = 0

    def _remember(self, turns: Messages, completion: Completion, continues: bool) -> None:
        text, tokens = completion.text, completion.tokens
        if not continues:
            answer = {"role": "assistant", "content": text, "tokens": tokens}
            self._turns = [*turns, answer] if text else self._turns
            return
        last = dict(turns[-1])
        before = last.pop("tokens", None)
        if before is not None and self.llm.tokenizer is not None:
            before = shown_tokens(self.llm.tokenizer, last["content"], before)
        own = {} if before is None else {"tokens": [*before, *tokens]}
        self._turns = [*turns[:-1], {**extended(last, text), **own}]

    def _fitting(self, turns: Messages, continues: bool) -> Messages:
        """What of `turns` is answered: without the oldest ones where those leave no room. The
        last one stays, whether it fits or not."""
        context, most = self.llm.context, self.sampling.max_tokens
        room = context // _LEAST_ROOM
        room = min(room, most) if isinstance(most, int) else room
        if self._length(turns, continues) + room <= context:
            return turns
        kept = turns
        for begin in _begins(turns)[1:]:
            kept = turns[begin:]
            if self._length(kept, continues) <= context - context // _ROOM_AGAIN:
                break
        return kept

    def _length(self, turns: Messages, continues: bool) -> int:
        assert self.llm.tokenizer is not None
        template = dataclasses.replace(self.template, continues=continues)
        return len(template.tokens(self.llm.tokenizer, [*self._opening, *turns]))


def _begins(messages: Messages) -> list[int]:
    """Where the turns of a conversation begin."""
    return [i for i, message in enumerate(messages) if message["role"] == "user"]
