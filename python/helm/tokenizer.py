"""Text to token ids and back, chat templates included; knows nothing of engines or sampling."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.arguments import short, shown, token_ids
from helm.errors import InvalidError, TokenizerError, printable
from helm.paths import kind

if TYPE_CHECKING:
    import jinja2
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
_MOST_TOKEN = 2**32 - 1  # of the backend
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's special tokens and chat templates.

    `encode` adds the special tokens (usually BOS) that tokenizer.json's post-processor adds.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # tokenizer.json may carry training-time truncation and padding
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self._skipped_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_ids = _byte_fallback_ids(backend)
        self._compiled: dict[str, jinja2.Template] = {}
        self._anchor: list[int] | None = None

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], vocab_size: int | None = None
    ) -> Tokenizer:
        """Read tokenizer.json and its companions.

        `vocab_size`: rows of the model's embedding; a tokenizer with ordinary tokens beyond it
        raises TokenizerError, as do missing and malformed files.
        """
        from tokenizers import Tokenizer as Backend

        directory = Path(directory)
        require_tokenizer(directory)
        path = directory / TOKENIZER_FILE
        try:
            backend = Backend.from_buffer(path.read_bytes())
        except PermissionError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"[tokenizer] {path} cannot be read: {error}; expected a Hugging Face fast "
                "tokenizer, download it again"
            ) from error
        config = _read_object(directory / "tokenizer_config.json")
        special = _special_tokens(_read_object(directory / "special_tokens_map.json"))
        special.update(_special_tokens(config))
        tokenizer = cls(backend, special, _chat_templates(directory, config))
        if vocab_size is not None:
            tokenizer._check_vocabulary(vocab_size, path)
        return tokenizer

    def _check_vocabulary(self, vocab_size: int, path: Path) -> None:
        # Added tokens past the end are tolerated (Gemma 3's text models have an image token
        # there); encoding one is refused where the prompt is checked against the model.
        ids = self._backend.get_vocab(with_added_tokens=False).values()
        largest = max(ids, default=-1)
        if largest >= vocab_size:
            raise TokenizerError(
                f"[tokenizer] {path} has token ids up to {largest}, the model's vocabulary has "
                f"{vocab_size} entries (ids up to {vocab_size - 1}); the tokenizer belongs to "
                "another model, use the one published with these weights"
            )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped tokenizer."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's own end-of-sequence token."""
        return self.token_id(self.special_tokens.get("eos_token", ""))

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self.token_id(self.special_tokens.get("bos_token", ""))

    def token_id(self, token: str) -> int | None:
        """Id of a token given as its exact string, None when there is no such token."""
        if not isinstance(token, str) or printable(token) != token:
            raise InvalidError(f"[tokenizer] expected a token as text, got {shown(token)}")
        found = self._backend.token_to_id(token) if token else None
        return None if found is None else int(found)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; TokenizerError when `text` is not a string of valid Unicode."""
        if not isinstance(text, str):
            raise TokenizerError(f"[tokenizer] text must be a str, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"[tokenizer] the text has a lone surrogate at character {error.start}, as bytes "
                "that are not UTF-8 become; give text in UTF-8"
            ) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of all `tokens` at once."""
        ids = self._ids(list(tokens) if isinstance(tokens, Iterator) else tokens)
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def _ids(self, tokens: Any) -> list[int]:
        ids = token_ids(tokens, "tokens", "tokenizer")
        for token in ids:
            if not 0 <= token <= _MOST_TOKEN:
                raise InvalidError(f"[tokenizer] {shown(token)} is no token id")
        return ids

    def token_text(self, token: int) -> str:
        """What one token adds within a text: its leading space is kept, bytes of an unfinished
        character show as U+FFFD."""
        if self._anchor is None:
            self._anchor = self.encode("a", add_special_tokens=False)
        before = self.decode(self._anchor, skip_special_tokens=False)
        return self.decode([*self._anchor, token], skip_special_tokens=False)[len(before) :]

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """An incremental decoder of what follows `prompt`."""
        return Detokenizer(self._backend, self._ids(prompt), self._skipped_ids, self._byte_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, after the model's own chat template.

        `template` names one of `chat_templates`. Encode the result with
        `add_special_tokens=False`: templates write their special tokens themselves.
        """
        check_messages(messages)
        if tools is not None and not isinstance(tools, (list, tuple)):
            raise TokenizerError(f"[chat] tools must be a list of tools, got {shown(tools)}")
        compiled = self._template(template or self._template_name(tools))
        scope: dict[str, Any] = {**self.special_tokens, **variables}
        scope.update(messages=[dict(m) for m in messages], tools=tools, documents=None)
        scope["add_generation_prompt"] = add_generation_prompt
        try:
            return compiled.render(scope)
        except Exception as error:  # a template is a program
            raise TokenizerError(
                f"[chat] the model's chat template refused the messages: {error}; use a model with "
                "a template that works, or generate from plain text"
            ) from error

    def _template_name(self, tools: Sequence[Any] | None) -> str:
        if tools and "tool_use" in self.chat_templates:
            return "tool_use"
        return "default"

    def _template(self, name: str) -> jinja2.Template:
        if name in self._compiled:
            return self._compiled[name]
        if name not in self.chat_templates:
            if self.chat_templates:
                known = ", ".join(sorted(self.chat_templates))
                what = f"has no chat template named {name!r} (it has: {known}); name one of them"
            else:
                what = (
                    "has no chat template (chat_template.jinja, or chat_template in "
                    "tokenizer_config.json); use an instruction-tuned model, add a template, "
                    "or generate from plain text instead"
                )
            raise TokenizerError(f"[chat] the model {what}")
        try:
            compiled = chat_environment().from_string(self.chat_templates[name])
        except Exception as error:  # beside TemplateError what compiling Python raises
            raise TokenizerError(
                f"[chat] the model's chat template {name!r} is malformed: {error}"
            ) from error
        self._compiled[name] = compiled
        return compiled


def require_tokenizer(directory: Path) -> None:
    """TokenizerError unless the folder has a tokenizer."""
    if kind(directory / TOKENIZER_FILE) != "file":
        raise TokenizerError(
            f"[tokenizer] {short(str(directory))} has no {TOKENIZER_FILE}; put the model's there "
            "(transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)), or give "
            "token ids instead of text, in Python"
        )


class Detokenizer:
    """Turns tokens into text as they arrive.

    `push(t0) + push(t1) + ... + flush()` equals decode(prompt + tokens)[len(decode(prompt)):]
    (a prompt that ends inside a character: the whole character is given).
    Text that later tokens could still change is held back: an unfinished UTF-8 character, and a
    run of byte-fallback tokens (its decoding is all or nothing) until the run ends.
    Each token is decoded at most `_window` times, whatever the length of the text.
    """

    # Tokens kept as context when the window slides: they absorb what decoders do at the start of
    # a text (dropped leading space), and cover more bytes than one UTF-8 character has.
    _kept = 6
    _window = 16

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt: Sequence[int] = (),
        skipped_ids: frozenset[int] = frozenset(),
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._backend = backend
        self._skipped_ids = skipped_ids
        self._byte_ids = byte_ids
        visible: list[int] = []
        for token in reversed(prompt):
            if token not in skipped_ids:
                visible.append(token)
                if len(visible) >= self._window and token not in byte_ids:
                    break  # never inside a run of byte tokens
        self._tokens = visible[::-1]
        text = self._text()
        self._emitted = len(text) - text.endswith("\ufffd")  # characters of _text() given out
        self._held = 0  # tokens since everything decodable was given out

    def _text(self) -> str:
        return str(self._backend.decode(self._tokens, skip_special_tokens=False))

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty."""
        if token in self._skipped_ids:
            return ""
        self._tokens.append(token)
        self._held += 1
        if token in self._byte_ids:
            return ""
        return self._give(last=False)

    def flush(self) -> str:
        """What was held back, once no token follows."""
        return self._give(last=True) if self._tokens else ""

    def _give(self, last: bool) -> str:
        text = self._text()
        end = len(text)
        if text.endswith("\ufffd") and not last:
            # An unfinished character spans fewer than _kept tokens; past that only the final
            # replacement character is open, what stands before it is truly invalid input.
            if self._held < self._kept:
                return ""
            end -= 1
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        self._held = 0
        if len(self._tokens) > self._window:
            del self._tokens[: -self._kept]
            self._emitted = len(self._text()) - (len(text) - end)
        return piece


def check_messages(messages: Any) -> None:
    """TokenizerError unless `messages` is a non-empty sequence of objects with a role."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f"[chat] messages must be a list of {{'role', 'content'}}, got "
            f"{type(messages).__name__}"
        )
    if not messages:
        raise TokenizerError("[chat] messages is empty; give at least one user message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(
                f"[chat] message {index} must be an object with a 'role' ('system', 'user', "
                f"'assistant') and a 'content', got {shown(message)}"
            )


def chat_environment() -> jinja2.Environment:
    """The sandbox in which published chat templates expect to run."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}`: marks assistant text for training, renders its body."""

        def __init__(self, environment: jinja2.Environment) -> None:
            self.tags = {"generation"}
            super().__init__(environment)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(pattern: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of `<0x00>` ... `<0xFF>` when the decoder joins them into characters."""
    if backend.decoder is None or b'"ByteFallback"' not in backend.decoder.__getstate__():
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; {} when the file is absent."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"[tokenizer] {path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"[tokenizer] {path} must hold a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; entries are strings or {"content": string} objects."""
    found = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: the .jinja files win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    for source in (_read_object(directory / "chat_template.json"), config):
        value = source.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        for entry in value if isinstance(value, list) else ():
            if isinstance(entry, Mapping):
                name, template = entry.get("name"), entry.get("template")
                if isinstance(name, str) and isinstance(template, str):
                    templates[name] = template
    files = {"default": directory / "chat_template.jinja"}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        if re.fullmatch(r"[A-Za-z0-9_-]+", path.stem):
            files[path.stem] = path
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise TokenizerError(f"[tokenizer] {path} cannot be read: {error}") from error
    return templates
