"""`helm-llm plan`: where a model would run on a machine, how fast, and why; loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from helm.base.familiar import as_options
from helm.commands import options
from helm.commands.lines import say
from helm.commands.parser import More, Parser
from helm.errors import InvalidError

if TYPE_CHECKING:
    from helm.compiler.solve import Study
    from helm.plan.schema import Plan

HELP = "show where a model would run, how fast and why, without loading it"
_CONCURRENCY = 8
EPILOG = """examples:
  helm-llm plan Qwen/Qwen3-8B                         for this machine
  helm-llm plan Qwen/Qwen3-8B --profile thesis-4060   for another one
  helm-llm plan ./config.json --profile thesis-3090 -c 16384 --plot plan.png
"""


def add_arguments(parser: Parser) -> None:
    """Adds this command's options."""
    options.add_model(parser, "folder, GGUF file, config.json or Hugging Face id")
    options.refuse_counts(parser, prompt=True)
    options.add_revision(parser)
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--profile", metavar="FILE|PRESET", help="the machine (default: this one, measured once)"
    )
    machine.add_argument("--list-profiles", action="store_true", help="list the presets")
    options.add_device(machine)
    options.add_memory(machine, rare=str)
    options.add_policy(machine)
    options.add_weights(machine)
    options.add_copies(machine)
    options.add_kv(parser)
    work = parser.add_argument_group("workload")
    work.add_argument(
        "-c", "--context", type=int, metavar="N",
        help="positions per request (default: 4096 or as needed)",
    )  # fmt: skip
    options.add_workload(work, rare=str)
    work.add_argument(
        "--concurrency", type=int, metavar="N",
        help=More("most requests at once, of --objective serve (default: 8)"),
    )  # fmt: skip
    options.add_dtypes(work, rare=str)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--formats", action="store_true",
        help="compare weights as stored, in bf16c, q8, q4",
    )  # fmt: skip
    output.add_argument(
        "--policies", action="store_true",
        help=More("also show what the published policies would reach"),
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--write", metavar="FILE",
        help=More("write the plan, as C++ programs read it (default: none)"),
    )  # fmt: skip
    output.add_argument(
        "--plot", metavar="FILE", help="draw it to a .png, .svg or .pdf (default: none)"
    )
    output.add_argument(
        "--timeline", metavar="FILE", help="draw steps over time to an .svg (default: none)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from helm.commands import plan_view

    if args.list_profiles:
        if args.json:
            print(json.dumps(plan_view.profile_rows(), indent=1))
        else:
            plan_view.show_profiles()
        return 0
    if args.plot is not None:
        from helm.commands.plots import check_plot

        check_plot(args.plot)
    if args.timeline is not None:
        from helm.commands.timeline_view import check_timeline

        check_timeline(args.timeline)
    if args.concurrency is None:
        args.concurrency = _CONCURRENCY if args.objective == "serve" else args.batch
    if args.formats:
        return _formats(args)
    study = _study(args)
    notices = [as_options(notice) for notice in study.plan.notices]
    if args.write is not None:
        _write(dataclasses.replace(study.plan, notices=tuple(notices)), args)
    if args.json:
        from helm.compiler.explain import to_dict
        from helm.compiler.visits.beside import policy_rows

        found = {**to_dict(study), "notices": notices}
        if args.policies:
            found["policies"] = [dataclasses.asdict(row) for row in policy_rows(study)]
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        plan_view.show(study, notices, policies=args.policies)
    if args.plot is not None:
        from helm.commands.plots import save_plot

        save_plot(study, args.plot)
        if not args.json:
            say(f"[plot: {args.plot}]")
    if args.timeline is not None:
        from helm.commands.timeline_view import save_timeline

        save_timeline(study, study.steps, args.timeline)
        if not args.json:
            say(f"[timeline: {args.timeline}]")
    return 0


def _write(plan: Plan, args: argparse.Namespace) -> None:
    from helm.model.hub import resolve_config

    if any(tensor.source is None for tensor in plan.tensors):
        raise InvalidError(
            "[plan] --write needs the model's weights, since a plan says where each lies; give "
            "their folder, such as `hf download MODEL` prints"
        )
    try:
        Path(args.write).write_text(plan.to_json() + "\n", encoding="utf-8")
    except (OSError, ValueError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise InvalidError(
            f"[plan] cannot write {args.write}: {why}; choose another --write FILE"
        ) from None
    if not args.json:
        place = resolve_config(args.model, args.revision)
        assert isinstance(place, Path)  # one with tensors that lie here
        folder = place.parent
        say(f"[plan for C++: {args.write}, weights in {folder}]")


def _study(args: argparse.Namespace) -> Study:
    from helm.commands.measuring import MeasureProgress
    from helm.session.options import StudyKeywords
    from helm.session.study import study

    with MeasureProgress() as measuring:
        return study(
            args.model,
            revision=args.revision,
            measuring=measuring.update,
            **options.keywords(args, StudyKeywords),
        )


def _formats(args: argparse.Namespace) -> int:
    from helm.commands import formats_view
    from helm.commands.measuring import MeasureProgress
    from helm.compiler.format_choice import format_rows
    from helm.session.options import PlanKeywords, load_options
    from helm.session.study import problem_of

    alone = {"--dtype": args.dtype != "auto", "--weights": args.weights != "auto"}
    alone |= {"--copy": bool(args.copies), "--write": args.write is not None}
    alone |= {"--plot": args.plot is not None, "--timeline": args.timeline is not None}
    alone |= {"--policies": args.policies}
    for option, given in alone.items():
        if given:
            raise InvalidError(
                f"[plan] --formats compares all formats and makes no plan; leave {option} out"
            )
    with MeasureProgress() as measuring:
        keywords = {**options.keywords(args, PlanKeywords), "measuring": measuring.update}
        problem = problem_of(args.model, args.revision, load_options(keywords))
    rows = format_rows(problem)
    if args.json:
        print(json.dumps(formats_view.to_dict(problem, rows), indent=1, allow_nan=False))
    else:
        formats_view.show(problem, rows)
    return 0
