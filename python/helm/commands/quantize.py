"""`helm-llm quantize`: saves a model in 8 or 4 bits, and says its size and what it lost."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from helm.base.familiar import as_options
from helm.base.formats import PACKED_POLICIES
from helm.base.sizes import counted
from helm.commands import options
from helm.commands.common import binary_bytes, count_text
from helm.commands.lines import say
from helm.commands.parser import Parser

if TYPE_CHECKING:
    from helm.session.quantize import Quantized

HELP = "save a model in 8 or 4 bits, which loads at once"
EPILOG = """examples:
  helm-llm quantize Qwen/Qwen3-0.6B --to q4
  helm-llm quantize ./my-model --to q8 -o ./my-model-8bit
  helm-llm quantize model-f16.gguf --to q4 --json
"""


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    options.add_model(parser)
    parser.add_argument(
        "--to", choices=PACKED_POLICIES, required=True, metavar="DTYPE",
        help="q8, or q4 for half of that (default: none, it must be said)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="a new folder (default: ./MODEL-DTYPE)"
    )
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: all)")
    parser.add_argument(
        "--requantize", action="store_true", help="also a quantised model, which loses more"
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="leave out the comparison of answers"
    )
    options.add_revision(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from helm.session.quantize import quantize

    made = quantize(
        args.model,
        args.output,
        to=args.to,
        revision=args.revision,
        requantize=args.requantize,
        compare_answers=not args.no_compare,
        threads=args.threads,
    )
    if args.json:
        print(json.dumps(_facts(made), indent=1, ensure_ascii=False))
        return 0
    for notice in made.notices:
        say(f"note: {as_options(notice)}")
    _show(made)
    return 0


def _facts(made: Quantized) -> dict[str, Any]:
    facts = dataclasses.asdict(made)
    formats = [{"format": name, **packed} for name, packed in facts["formats"].items()]
    notices = [as_options(notice) for notice in made.notices]
    return {**facts, "folder": str(made.folder), "formats": formats, "notices": notices}


def _show(made: Quantized) -> None:
    from rich.table import Table

    from helm.commands.console import console

    table = Table(box=None, pad_edge=False)
    table.add_column("format")
    for name in ("weights", "size", "error"):
        table.add_column(name, justify="right")
    for format, packed in made.formats.items():
        error = f"{packed.relative_rms * 100:.2f} %"
        table.add_row(format, count_text(packed.weights), binary_bytes(packed.bytes), error)
    console(pipe_width=120).print(table)
    if made.divergence is not None:
        found = made.divergence
        print(
            f"answers: KL divergence {found.kl:.4f} per token, the same likeliest token at "
            f"{found.same_token * 100:.1f} % of {counted(found.tokens, 'position')}"
        )
    say(
        f"[saved {made.folder}: {binary_bytes(made.bytes)}, from {binary_bytes(made.source_bytes)} "
        f"of weights, in {made.seconds:,.1f} s]"
    )
