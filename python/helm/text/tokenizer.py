"""Text to token ids and back, conversations included; knows nothing of engines or sampling."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.arguments import count, short, shown, token_ids
from helm.base.files import present, read_text
from helm.base.summaries import Summarized
from helm.errors import InvalidError, TokenizerError, printable
from helm.text.added_tokens import read_object, read_stated_tokens
from helm.text.chat_template import ChatTemplates, read_templates, templates_of
from helm.text.detokenizer import Detokenizer
from helm.text.tokenizer_backend import answering

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
_MOST_BYTES = 256 << 20
_LONG = 2000  # characters
_MOST_TOKEN = 2**32 - 1  # of the backend


class Tokenizer(Summarized):
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
        self._templates = ChatTemplates(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self._skipped_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_ids = _byte_fallback_ids(backend)
        self._anchor: list[int] | None = None
        self._literal: tokenizers.Tokenizer | None = None

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], vocab_size: int | None = None
    ) -> Tokenizer:
        """Read tokenizer.json and its companions.

        `vocab_size`: rows of the model's embedding; a tokenizer with ordinary tokens beyond it, or
        its end-of-sequence token, raises TokenizerError, as do missing and malformed files.
        """
        from tokenizers import Tokenizer as Backend

        directory = Path(directory)
        require_tokenizer(directory)
        path = directory / TOKENIZER_FILE
        text = read_text(path, TokenizerError, "tokenizer", _MOST_BYTES)
        with answering(
            f"[tokenizer] {path} cannot be read",
            "expected a Hugging Face fast tokenizer, download it again",
        ):
            backend = Backend.from_str(text)
        config = read_object(directory / "tokenizer_config.json")
        stated = read_stated_tokens(directory, config)
        stated.add_to(backend)
        tokenizer = cls(backend, stated.special, read_templates(directory, config))
        if vocab_size is not None:
            rows = count(vocab_size, "[tokenizer] vocab_size")
            tokenizer._check_vocabulary(rows, path)
        return tokenizer

    @classmethod
    def from_transformers(cls, tokenizer: Any, vocab_size: int | None = None) -> Tokenizer:
        """Of transformers' PreTrainedTokenizerFast: a copy of its backend, its special tokens and
        its chat templates. vocab_size: see `from_directory`."""
        from tokenizers import Tokenizer as Backend

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise TokenizerError(
                f"[tokenizer] {type(tokenizer).__name__} has no backend of the tokenizers library; "
                "give a PreTrainedTokenizerFast, or a folder with tokenizer.json"
            )
        try:
            copy = Backend.from_str(backend.to_str())
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"[tokenizer] {type(tokenizer).__name__} cannot be copied: {error}; save it with "
                "save_pretrained, and give that folder"
            ) from error
        special = tokenizer.special_tokens_map.items()
        made = cls(
            copy,
            {name: token for name, token in special if isinstance(token, str)},
            templates_of({"chat_template": tokenizer.chat_template}),
        )
        if vocab_size is not None:
            made._check_vocabulary(vocab_size, type(tokenizer).__name__)
        return made

    def files(self) -> dict[str, bytes]:
        """By name, files of which `from_directory` makes the same tokenizer."""
        stated: dict[str, Any] = dict(self.special_tokens)
        if self.chat_templates:
            stated["chat_template"] = [
                {"name": name, "template": text} for name, text in self.chat_templates.items()
            ]
        return {
            TOKENIZER_FILE: self._backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(stated, indent=2).encode(),
        }

    def _check_vocabulary(self, vocab_size: int, path: Path | str) -> None:
        # Other added tokens past the end are tolerated (Gemma 3's text models have an image token
        # there); encoding one is refused where the prompt is checked against the model.
        ids = self._backend.get_vocab(with_added_tokens=False).values()
        largest = max(max(ids, default=-1), self.eos_token_id or 0)
        if largest >= vocab_size:
            raise TokenizerError(
                f"[tokenizer] {path} has token ids up to {largest}, the model's vocabulary has "
                f"{vocab_size} entries (ids up to {vocab_size - 1}); the tokenizer belongs to "
                "another model, use the one published with these weights"
            )

    def _summary(self) -> tuple[str, dict[str, str]]:
        special = ", ".join(
            f"{name.removesuffix('_token')} {token!r}"
            for name, token in sorted(self.special_tokens.items())
        )
        names = ", ".join(sorted(self.chat_templates)) or "none"
        return f"of {self.vocab_size:,} tokens", {
            "special tokens": special or "no special tokens",
            "chat templates": f"chat templates: {names}",
        }

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
        with answering(f"[tokenizer] {shown(text)} cannot be encoded"):
            return _encoded(self._backend, text, add_special_tokens)

    @property
    def special_pattern(self) -> re.Pattern[str] | None:
        """What finds the special tokens in a text; None where there are none."""
        added = self._backend.get_added_tokens_decoder().values()
        contents = sorted((t.content for t in added if t.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of `text`, in which special tokens are text like any other."""
        if self._literal is None:
            literal = type(self._backend).from_str(self._backend.to_str())
            literal.encode_special_tokens = True
            self._literal = literal
        with answering(f"[tokenizer] {shown(text)} cannot be encoded"):
            return _encoded(self._literal, text, False)

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of all `tokens` at once."""
        ids = self._ids(list(tokens) if isinstance(tokens, Iterator) else tokens)
        with answering("[tokenizer] these tokens cannot be decoded"):
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

    def detokenizer(
        self, prompt: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """An incremental decoder of what follows `prompt`; shown: special tokens that are text."""
        skipped = self._skipped_ids - shown if shown else self._skipped_ids
        return Detokenizer(self._backend, self._ids(prompt), skipped, self._byte_ids)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates by name."""
        return self._templates.sources

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, after the model's own chat template.

        `template` names one of `chat_templates`; None: "tool_use" with tools, where there is one,
        else "default". With `continue_final_message` the text ends within the last message, which
        is to be continued. Encode the result with `add_special_tokens=False`: templates write
        their special tokens themselves.
        """
        scope = {**self.special_tokens, **variables}
        return self._templates.render(
            messages, scope, tools, template, add_generation_prompt, continue_final_message
        )


def require_tokenizer(directory: Path) -> None:
    """TokenizerError unless the folder has a tokenizer."""
    if not present(directory / TOKENIZER_FILE, TokenizerError, "tokenizer"):
        raise TokenizerError(
            f"[tokenizer] {short(str(directory))} has no {TOKENIZER_FILE}; put the model's there "
            "(transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)), or give "
            "token ids instead of text, in Python"
        )


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of `<0x00>` ... `<0xFF>` when the decoder joins them into characters."""
    if backend.decoder is None or b'"ByteFallback"' not in backend.decoder.__getstate__():
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def _encoded(backend: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Ids. Of the backend's calls only those for batches let other threads use the interpreter
    meanwhile."""
    if len(text) < _LONG or not hasattr(backend, "encode_batch_fast"):
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(found.ids)
