"""Tokens that the files beside tokenizer.json state, with their ids and flags.

As in transformers: `added_tokens_decoder` of tokenizer_config.json says what tokens there are, and
added_tokens.json and special_tokens_map.json speak where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.files import present, read_text
from helm.base.jsonio import parse
from helm.errors import TokenizerError, printable
from helm.text.tokenizer_backend import answering

if TYPE_CHECKING:
    import tokenizers

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class StatedTokens:
    """What the files state.

    special: special tokens by the name of their purpose ("eos_token").
    ids: of tokens by content, with the file that says so.
    listed, others: tokens to add, in this order; `others` only if they are not known.
    """

    special: dict[str, str]
    ids: dict[str, tuple[int, str]]
    listed: list[tokenizers.AddedToken]
    others: list[tokenizers.AddedToken]

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Makes `backend` know them; TokenizerError where an id would be another one."""
        with answering("[tokenizer] the tokens beside tokenizer.json cannot be added to it"):
            backend.add_tokens(self.listed)
            known = {token.content for token in backend.get_added_tokens_decoder().values()}
            backend.add_tokens([token for token in self.others if token.content not in known])
        for content, (wanted, file) in self.ids.items():
            found = backend.token_to_id(content)
            if found != wanted:
                raise TokenizerError(
                    f"[tokenizer] {file} gives {content!r} the id {wanted}, with tokenizer.json it "
                    f"gets {found}; the files belong to different models, download them again"
                )


def read_stated_tokens(directory: Path, config: Mapping[str, Any]) -> StatedTokens:
    """From tokenizer_config.json, which is `config`, added_tokens.json, special_tokens_map.json."""
    legacy = read_object(directory / "special_tokens_map.json")
    listed = config.get("added_tokens_decoder")
    # A list of tokens is newer than the map, which else wins.
    sources = (config, legacy) if listed is None else (legacy, config)
    named: dict[str, tokenizers.AddedToken] = {}
    extra: list[tokenizers.AddedToken] = []
    for source in sources:
        for name, value in source.items():
            if name.endswith("_token"):
                _name(named, name, value)
            elif name in _EXTRA and isinstance(value, Mapping):
                for purpose, token in value.items():
                    _name(named, purpose, token)
            elif name in _EXTRA and isinstance(value, list):
                extra += [token for token in map(_special, value) if token is not None]
    special = {token.content for token in (*named.values(), *extra)}
    by_id = _decoder(listed, directory / "tokenizer_config.json", special)
    ids = {token.content: (i, "tokenizer_config.json") for i, token in by_id.items()}
    others = {}
    for content, number in read_object(directory / "added_tokens.json").items():
        where = f"added_tokens.json, {content!r}"
        ids.setdefault(content, (_id(number, where), "added_tokens.json"))
        others[ids[content][0]] = _token(content, {}, where, content in special)
    return StatedTokens(
        special={name: token.content for name, token in named.items()},
        ids={content: stated for content, stated in ids.items() if content},
        listed=[by_id[i] for i in sorted(by_id)],
        others=[*(others[i] for i in sorted(others)), *named.values(), *extra],
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; {} when the file is absent."""
    if not present(path, TokenizerError, "tokenizer"):
        return {}
    return parse(read_text(path, TokenizerError, "tokenizer"), str(path), TokenizerError).names()


def _decoder(listed: Any, path: Path, special: set[str]) -> dict[int, tokenizers.AddedToken]:
    """Tokens by id from {"id": {"content", flags}}."""
    if not isinstance(listed, Mapping | None):
        raise TokenizerError(f"[tokenizer] {path}: added_tokens_decoder must be an object by id")
    tokens = {}
    for key, entry in (listed or {}).items():
        where = f"{path.name}, added_tokens_decoder[{key!r}]"
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str):
            raise TokenizerError(f"[tokenizer] {where}: expected a token with its content")
        marked = entry.get("special", False) is True or content in special
        tokens[_id(key, where)] = _token(content, entry, where, marked)
    return tokens


def _id(value: Any, where: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 10:
        raise TokenizerError(f"[tokenizer] {where}: {value!r} is not a token id")
    return int(text)


def _name(named: dict[str, tokenizers.AddedToken], name: str, value: Any) -> None:
    token = _special(value)
    if token is not None:
        named[name] = token


def _special(value: Any) -> tokenizers.AddedToken | None:
    """A special token given as its text or as an object with flags; None for anything else."""
    content = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(content, str) or not content:
        return None
    return _token(content, value if isinstance(value, Mapping) else {}, repr(content), True)


def _token(
    content: str, entry: Mapping[str, Any], where: str, special: bool
) -> tokenizers.AddedToken:
    from tokenizers import AddedToken

    if printable(content) != content:
        raise TokenizerError(
            f"[tokenizer] {printable(where)}: the token {printable(content)!r} is no valid Unicode "
            "text; download the tokenizer's files again"
        )
    flags = {name: entry[name] for name in _FLAGS if entry.get(name) is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TokenizerError(f"[tokenizer] {where}: {name} must be true or false, got {flag!r}")
    return AddedToken(content, special=special, **flags)
