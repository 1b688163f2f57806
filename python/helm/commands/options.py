"""Options that several commands share, and what they say; loads nothing.

What helps everyone is in --help, the rest (More) in --help-all.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from helm.base.files import read_text
from helm.base.formats import DTYPE_CHOICES, KV_DTYPES, dtype_name
from helm.commands.parser import More, Parser
from helm.compiler.kv_options import PAGE_CHOICES, PAGE_TOKENS, SITES
from helm.compiler.load_cost import WEIGHTS
from helm.compiler.problem import POLICIES
from helm.errors import InvalidError
from helm.plan.records import OBJECTIVES, WATERMARK


def add_model(parser: Parser, files: str = "folder, GGUF file or Hugging Face id") -> None:
    """MODEL, with or without -m."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{files} (default: bundled)")
    parser.add_argument(
        "-m", "--model", dest="model_option", metavar="MODEL", help="the same as MODEL"
    )


def add_prompt(parser: Parser, help: str) -> None:
    """PROMPT, with or without -p."""
    refuse_counts(parser, prompt=False)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=help)
    parser.add_argument(
        "-p",
        "--prompt",
        dest="prompt_option",
        metavar="TEXT",
        type=_text,
        help="the same as PROMPT",
    )


def _text(value: str) -> str:
    if value.isascii() and value.isdigit():
        raise argparse.ArgumentTypeError(
            f"{value} is no text; the number of prompt tokens to plan for is --prompt-tokens "
            f"{value}, and the text {value} is given as PROMPT"
        )
    return value


def settle(args: argparse.Namespace) -> None:
    """Makes `model` and `prompt` of what was given with and without -m and -p, and
    `insists_on_input` of a PROMPT "-"."""
    takes_prompt = hasattr(args, "prompt_option")
    if getattr(args, "model_option", None) is not None:
        if takes_prompt and args.prompt is None:
            args.prompt = args.model
        elif args.model is not None:
            args.parser.error("MODEL is given twice, without and with -m")
        args.model = args.model_option
    if not takes_prompt:
        return
    args.insists_on_input = args.prompt == "-"
    if args.insists_on_input:
        args.prompt = None
    if args.prompt_option is not None:
        if args.prompt is not None:
            args.parser.error("PROMPT is given twice, without and with -p")
        args.prompt = args.prompt_option


def refuse_counts(parser: Parser, prompt: bool) -> None:
    """--output, and --prompt where it is none of the command's options, name the planner's."""
    remedy = "the number of {} tokens to plan for is --{}-tokens {{value}}"
    if prompt:
        parser.refuse("-p", "--prompt", remedy=remedy.format("prompt", "prompt"))
        parser.refuse("-n", "--max-tokens", remedy=remedy.format("output", "output"))
    parser.refuse("--output", remedy=remedy.format("output", "output"))


def add_model_arguments(parser: Parser, rare: type[str] = More) -> None:
    """Options that say what is loaded, and how; rare: whether --help shows the workload."""
    group = parser.add_argument_group("model and machine")
    group.add_argument(
        "-c", "--context", type=int, metavar="N",
        help="positions in all (default: the model's, if they fit)",
    )  # fmt: skip
    group.add_argument(
        "-t",
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads (default: measured, fewer beside others)",
    )
    add_dtypes(group)
    add_device(group)
    add_memory(group)
    add_policy(group)
    group.add_argument("-q", "--quiet", action="store_true", help="no plan line and no summary")
    more = parser.add_argument_group("loading")
    add_revision(more)
    add_tokenizer(more)
    add_weights(more)
    add_copies(more)
    more.add_argument(
        "--profile", metavar="FILE|PRESET",
        help=More("rates to plan by (default: this machine's, measured once)"),
    )  # fmt: skip
    add_kv(parser)
    work = parser.add_argument_group("workload, for which the placement is the fastest")
    add_workload(work, rare)


def add_speculation(parser: Parser) -> None:
    """--speculate."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculate", type=_speculation, default="auto", metavar="HOW|MODEL",
        help=More(
            "guess what repeats earlier text, as much as pays: ngram, off; or what a smaller MODEL "
            "with the same vocabulary says (default: auto, where no token changes)"
        ),
    )  # fmt: skip


def _speculation(value: str) -> str:
    from helm.session.speculation import draft_named

    try:
        draft_named(value)
    except InvalidError as error:
        raise argparse.ArgumentTypeError(str(error).partition("speculate ")[2]) from None
    return value


def add_revision(group: argparse._ActionsContainer) -> None:
    """--revision."""
    group.add_argument(
        "--revision", metavar="NAME",
        help=More("branch, tag or commit of a Hugging Face id (default: main)"),
    )  # fmt: skip


def add_tokenizer(group: argparse._ActionsContainer) -> None:
    """--tokenizer."""
    group.add_argument(
        "--tokenizer", metavar="FOLDER|ID",
        help=More("another tokenizer than the model's own (default: its own)"),
    )  # fmt: skip


def add_memory(group: argparse._ActionsContainer, rare: type[str] = More) -> None:
    """--vram, --ram; rare: whether --help shows the latter."""
    group.add_argument(
        "--vram", metavar="SIZE", help="accelerator memory, as 8GiB (default: what is free)"
    )
    group.add_argument(
        "--ram", metavar="SIZE", help=rare("host memory, as 12GB (default: what is free)")
    )


def add_device(group: argparse._ActionsContainer) -> None:
    """--device."""
    group.add_argument(
        "--device", metavar="DEVICE",
        help="cpu, cuda, cuda:N, sim:vram=2GiB (default: GPU if any)",
    )  # fmt: skip


def add_policy(group: argparse._ActionsContainer) -> None:
    """--policy."""
    group.add_argument(
        "--policy", choices=POLICIES, default="auto", metavar="HOW",
        help=More(
            "layers on one device each (layer-partition), or some cut between GPU and CPU, which "
            "compute them at once (cut) (default: auto, the faster one); or a published policy: "
            "FlexGen's zigzag, helm-placement and all-cpu of Gupta and Dwarkadas, "
            "workload-distribution of Park and Egger"
        ),
    )  # fmt: skip


def add_weights(group: argparse._ActionsContainer) -> None:
    """--weights."""
    group.add_argument(
        "--weights", choices=WEIGHTS, default="auto", metavar="HOW",
        help=More(
            "copied; mapped: starts at once; compressed: bf16 in 12 bits, exactly, for less "
            "memory and faster text (default: auto, what takes less time in all)"
        ),
    )  # fmt: skip


def add_copies(group: argparse._ActionsContainer) -> None:
    """--copy."""
    group.add_argument(
        "--copy", action="append", default=[], dest="copies", metavar="FOLDER",
        help=More(
            "a copy of the model on another drive: what memory does not hold is read from all at "
            "once; may be repeated (default: none)"
        ),
    )  # fmt: skip


def add_kv(parser: Parser) -> None:
    """Where KV pages of layers on the accelerator lie."""
    group = parser.add_argument_group("KV pages of layers on the accelerator")
    group.add_argument(
        "--kv-overflow", choices=SITES, default="auto", metavar="HOW",
        help=More(
            "those that it has no room for visit it (stream), or the CPU attends to them "
            "(cpu) (default: auto, the faster one)"
        ),
    )  # fmt: skip
    group.add_argument(
        "--kv-vram", metavar="SIZE",
        help=More("memory for them there at most (default: as is fastest)"),
    )  # fmt: skip
    group.add_argument(
        "--watermark", type=float, metavar="F",
        help=More(f"share of it in use beyond which the oldest leave (default: {WATERMARK})"),
    )  # fmt: skip
    least = PAGE_CHOICES[0]
    group.add_argument(
        "--page-tokens", type=int, default=PAGE_TOKENS, metavar="N",
        help=More(f"positions of a page (default: {PAGE_TOKENS}, of `serve` {least} if as fast)"),
    )  # fmt: skip


def add_dtypes(group: argparse._ActionsContainer, rare: type[str] = More) -> None:
    """What weights and KV cache are held in; rare: whether --help shows the latter."""
    group.add_argument(
        "--dtype", type=dtype_name, choices=DTYPE_CHOICES, default="auto", metavar="DTYPE",
        help=f"{', '.join(DTYPE_CHOICES[1:])} (default: as stored)",
    )  # fmt: skip
    group.add_argument(
        "--kv-dtype", type=dtype_name, choices=("auto", *KV_DTYPES), default="auto",
        metavar="DTYPE",
        help=rare(f"KV in {', '.join(KV_DTYPES)} (default: auto, as weights)"),
    )  # fmt: skip


def add_workload(group: argparse._ActionsContainer, rare: type[str] = More) -> None:
    """What a plan is made for, besides its context; rare: whether --help shows it."""
    group.add_argument(
        "--prompt-tokens", type=int, metavar="N", help=rare("prompt tokens (default: 512)")
    )
    group.add_argument(
        "--output-tokens", type=int, metavar="N", help=rare("output tokens (default: 128)")
    )
    group.add_argument(
        "--batch", type=int, default=1, metavar="N", help=rare("requests at once (default: 1)")
    )
    default = "total" if rare is str else "total, of `serve` serve"  # `plan` fits a screen
    group.add_argument(
        "--objective", choices=OBJECTIVES, default="total", metavar="WHAT",
        help=rare("|".join(OBJECTIVES) + f" (default: {default})"),
    )  # fmt: skip


def add_sampling_arguments(parser: Parser, most: str) -> None:
    """Options of SamplingParams; what is not given is the model's own default. most: new tokens
    where neither user nor model says."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n", "--max-tokens", type=int, metavar="N",
        help=f"new tokens (default: {most})",
    )  # fmt: skip
    for name, metavar, text in (
        ("--temperature", "T", "0 is greedy (default: the model's, else 0)"),
        ("--top-p", "P", "tokens of this probability (default: the model's, or 1)"),
        ("--top-k", "K", More("the K likeliest tokens (default: the model's, else 0: all)")),
        ("--min-p", "P", More("tokens from this share of the likeliest's probability (default: the "
                              "model's, else 0)")),
        ("--repetition-penalty", "R", More("above 1 repeats less (default: the model's, else 1, "
                                           "off)")),
        ("--presence-penalty", "X", More("subtracted from logits of tokens in the output, -2 to 2 "
                                         "(default: 0)")),
        ("--frequency-penalty", "X", More("the same for each time they occur (default: 0)")),
    ):  # fmt: skip
        number = int if metavar == "K" else float
        group.add_argument(name, type=number, metavar=metavar, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT",
        help=More("end before TEXT; may be repeated (default: the model's)"),
    )  # fmt: skip
    group.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=BIAS",
        help=More("added to a token's logit, -100 to 100; may be repeated (default: none)"),
    )  # fmt: skip
    group.add_argument(
        "--json-schema", metavar="FILE",
        help=More("text is JSON after the schema in FILE; needs llguidance (default: free text)"),
    )  # fmt: skip
    group.add_argument(
        "--regex", metavar="PATTERN",
        help=More("text matches PATTERN as a whole; needs llguidance (default: free text)"),
    )  # fmt: skip
    group.add_argument(
        "--grammar", metavar="FILE",
        help=More("text obeys the grammar in FILE, in Lark's syntax (default: free text)"),
    )  # fmt: skip
    group.add_argument(
        "-s", "--seed", type=int, metavar="N", help="same seed, same text (default: random)"
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by their names."""
    names = (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "stop", "seed", "regex"),
    )
    options = {name: getattr(args, name) for name in names}
    if args.logit_bias is not None:
        options["logit_bias"] = dict(args.logit_bias)
    if args.json_schema is not None:
        options["json_schema"] = read_text(Path(args.json_schema), InvalidError, "schema")
    if args.grammar is not None:
        options["grammar"] = read_text(Path(args.grammar), InvalidError, "grammar")
    return {name: value for name, value in options.items() if value is not None}


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is none; expected a token's id and a number, as 42=-100"
        ) from None


def size(text: str | None, option: str) -> int | None:
    """Bytes of an option's value, None where it was not given."""
    from helm.base.sizes import parse_size

    return None if text is None else parse_size(text, option)


def keywords(args: argparse.Namespace, known: type) -> dict[str, Any]:
    """What the options say, by the names of Python that a TypedDict has."""
    given = {
        **vars(args),
        "kv_vram_bytes": size(args.kv_vram, "--kv-vram"),
        "memory_bytes": size(args.ram, "--ram"),
        "vram_bytes": size(args.vram, "--vram"),
        "max_sequences": getattr(args, "concurrency", args.batch),
    }
    return {name: given[name] for name in known.__annotations__ if name in given}
