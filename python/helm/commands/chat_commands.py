"""What a line of a chat that begins with / does; knows no terminal."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helm.base.familiar import option
from helm.commands import template_options
from helm.commands.lines import say, say_error
from helm.commands.session import Session
from helm.errors import HelmError
from helm.text.sampling import SamplingParams

_COMMAND = re.compile(r"(/[a-z?]+)(?:[ \t]+(.*))?", re.I)
# What /set takes, with the values that it may have.
_SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "seed": int,
    "stop": str,
}


@dataclass(frozen=True)
class _Command:
    """takes: what stands behind it; one in brackets may be left out. other: further names."""

    name: str
    takes: str
    does: str
    other: tuple[str, ...] = ()


_COMMANDS = (
    _Command("/clear", "", "forget the conversation", ("/reset",)),
    _Command("/regenerate", "", "answer the last message again", ("/regen",)),
    _Command("/continue", "", "go on with the last answer"),
    _Command("/system", "[TEXT]", "change the system prompt, or show it"),
    _Command("/set", "[NAME VALUE]", "change how answers are sampled, or show it"),
    _Command("/think", "on|off", "let the model think before it answers, or not"),
    _Command("/save", "FILE", "save the conversation for --load-kv"),
    _Command("/?", "", "show this", ("/help", "/h")),
    _Command("/bye", "", "leave (also Ctrl-D)", ("/exit", "/quit")),
)
_BY_NAME = {name: c for c in _COMMANDS for name in (c.name, *c.other)}
HELP = "\n".join(
    [
        *(f"{f'{c.name} {c.takes}':20}{c.does}" for c in _COMMANDS),
        '"""'.ljust(20) + "begins and ends a message of several lines",
        "Ctrl-C".ljust(20) + "stops an answer",
    ]
)


class Turns:
    """Gives each line of input to the conversation. left: whether one has ended it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._initial = session.sampling
        self.left = False

    def take(self, text: str) -> bool:
        """A command, or a message to answer. False when it failed."""
        found = _COMMAND.fullmatch(text)
        if found is None:
            message = _message(text)
            return not message or self._session.answer(message)
        name, argument = found[1].lower(), (found[2] or "").strip()
        command = _BY_NAME.get(name)
        if command is None:
            close = difflib.get_close_matches(name, _BY_NAME, 1)
            meant = f"did you mean {close[0]}?" if close else "/? lists them"
            say(f'(no command {name}; {meant} A message may stand between """)')
            return True
        if bool(argument) != bool(command.takes) and not command.takes.startswith("["):
            say(f"({command.name} takes {command.takes or 'nothing else'})")
            return True
        done = getattr(self, "_" + (command.name.strip("/?") or "help"))(argument)
        return done is not False

    def _clear(self, _: str) -> None:
        self._session.clear()
        say("(conversation forgotten)")

    def _regenerate(self, _: str) -> bool:
        return self._session.regenerate()

    def _continue(self, _: str) -> bool:
        return self._session.go_on()

    def _save(self, path: str) -> bool:
        return self._session.save(os.path.expanduser(path))

    def _help(self, _: str) -> None:
        say(HELP)

    def _bye(self, _: str) -> None:
        self.left = True

    def _system(self, text: str) -> None:
        session, before = self._session, self._session.system
        if not text:
            say(f"(system prompt: {before})" if before else "(the system prompt is the template's)")
            return
        session.system = text
        try:
            session.check()
        except HelmError as error:
            session.system = before
            say_error(error)
        else:
            say("(system prompt changed)")

    def _think(self, wanted: str) -> None:
        session = self._session
        if wanted not in ("on", "off"):
            say("(/think takes on|off)")
            return
        before = session.template
        session.template = template_options.thinking(session.llm.tokenizer, before, wanted)
        if session.template is not before:
            say(f"(thinking is {wanted})")

    def _set(self, argument: str) -> None:
        session = self._session
        given, _, value = argument.removeprefix("parameter ").strip().partition(" ")
        value = value.strip()
        if not given:
            say("\n".join(_shown(session.sampling, name) for name in _SETTINGS))
            return
        try:
            name = _setting(given)
            if not value:
                say(_shown(session.sampling, name))
                return
            new = _value(name, value, self._initial)
            session.sampling = dataclasses.replace(session.sampling, **{name: new})
        except HelmError as error:
            say(f"error: {error}")  # in the names of /set, which are Python's too
        except ValueError as reason:
            say(f"({reason})")
        else:
            say(_shown(session.sampling, name))


def _message(text: str) -> str:
    """What stands between three quotes, or all of it."""
    inner = text.strip()
    if not inner.startswith('"""'):
        return inner
    return inner[3:].removesuffix('"""').strip("\n")


def _setting(given: str) -> str:
    """The parameter that a name of any engine means; ValueError, or InvalidError, for others."""
    ours = option("--" + given.lstrip("-").replace("_", "-")) or given
    name = ours.lstrip("-").replace("-", "_").lower()
    if name in _SETTINGS:
        return name
    close = difflib.get_close_matches(name, _SETTINGS, 1)
    known = ", ".join(map(_dashed, _SETTINGS))
    meant = f"did you mean {_dashed(close[0])}?" if close else f"known: {known}"
    raise ValueError(f"/set knows no {given}; {meant}")


def _value(name: str, text: str, initial: SamplingParams) -> Any:
    if text == "default":
        return getattr(initial, name)
    kind = _SETTINGS[name]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"/set {_dashed(name)} takes {what}, or default; got {text}") from None


def _shown(sampling: SamplingParams, name: str) -> str:
    value = getattr(sampling, name)
    if name == "stop" and value is not None:
        value = " ".join(map(repr, value)) or None
    shown = {"max_tokens": "no limit", "seed": "random"}.get(name, "the model's")
    return f"({_dashed(name)}: {shown if value is None else value})"


def _dashed(name: str) -> str:
    return name.replace("_", "-")
