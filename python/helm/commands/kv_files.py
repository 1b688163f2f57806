"""--load-kv and --save-kv of several commands: what was computed before is not computed again."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helm.base.paths import kind, permitted
from helm.base.progress import progress_bar
from helm.commands import common
from helm.commands.lines import say
from helm.commands.parser import More, Parser
from helm.errors import InvalidError

if TYPE_CHECKING:
    from helm.session.llm import LLM
    from helm.session.saved_kv import SavedKV


def add_arguments(parser: Parser, load: str, save: str) -> None:
    """The two options; load, save: their help."""
    group = parser.add_argument_group("KV cache in a file")
    group.add_argument("--load-kv", metavar="FILE", help=More(f"{load} (default: none)"))
    group.add_argument("--save-kv", metavar="FILE", help=More(f"{save} (default: none)"))


def check(args: argparse.Namespace) -> None:
    """Refuses files that cannot be there before the model is loaded."""
    from helm.session.saved_kv import file_name

    for path in filter(None, (args.load_kv, args.save_kv)):
        file_name(path)
    with permitted("kv"):
        found = args.load_kv is None or kind(args.load_kv) == "file"
    if not found:
        raise InvalidError(f"[kv] --load-kv: there is no file {args.load_kv}")
    if args.save_kv is not None:
        target = os.path.realpath(args.save_kv)
        if os.path.exists(target) and not os.path.isfile(target):
            raise InvalidError(
                f"[kv] --save-kv: cannot write {args.save_kv}, which is no regular file; name a "
                "new file, or one to be replaced"
            )
        if not os.access(os.path.dirname(target), os.W_OK | os.X_OK):
            raise InvalidError(
                f"[kv] --save-kv: cannot write {args.save_kv}; name a file in a folder that exists "
                "and can be written to"
            )


def load(llm: LLM, path: str, quiet: bool) -> SavedKV:
    """Takes up the file; says how much it holds."""
    with progress_bar(None, "loading KV cache") as progress:
        saved = llm.load_kv(path, progress=progress)
    if not quiet:
        say(f"[kv: {saved.cached} tokens restored from {path}]")
    return saved


def save(
    llm: LLM, path: str, quiet: bool, messages: Sequence[Mapping[str, Any]] | None = None
) -> int:
    """Writes the last call's cache; says how much that was, and returns it."""
    with progress_bar(None, "saving KV cache") as progress:
        count = llm.save_kv(path, messages=messages, progress=progress)
    if not quiet:
        size = common.binary_bytes(Path(path).stat().st_size)
        say(f"[kv: {count} tokens saved to {path}, {size}]")
    return count
