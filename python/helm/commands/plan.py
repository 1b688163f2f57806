"""`helm-llm plan`: where a model would run on a machine, how fast, and why; loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from helm.base.familiar import as_options
from helm.commands import options
from helm.commands.lines import say
from helm.commands.parser import More, Parser
from helm.errors import CheckpointError, InvalidError, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from helm.compiler.study import Study
    from helm.machine.profile import Profile
    from helm.model.checkpoint import TensorInfo
    from helm.model.config import ModelConfig

HELP = "show where a model would run, how fast and why, without loading it"
EPILOG = """examples:
  helm-llm plan Qwen/Qwen3-8B                         for this machine
  helm-llm plan Qwen/Qwen3-8B --profile thesis-4060   for another one
  helm-llm plan Qwen/Qwen3-8B --device sim:vram=4GiB  with a smaller card
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
    options.add_weights(machine)
    options.add_kv(parser)
    work = parser.add_argument_group("workload")
    work.add_argument(
        "-c", "--context", type=int, metavar="N",
        help="positions per request (default: 4096 or as needed)",
    )  # fmt: skip
    options.add_workload(work, rare=str)
    options.add_dtypes(work, rare=str)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--write", metavar="FILE",
        help=More("write the plan, as C++ programs read it (default: none)"),
    )  # fmt: skip
    output.add_argument(
        "--plot", metavar="FILE", help="draw it to a .png, .svg or .pdf (default: none)"
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
    study = _study(args)
    if args.write is not None:
        _write(study, args)
    if args.json:
        from helm.compiler.explain import to_dict

        print(json.dumps(to_dict(study), indent=1, allow_nan=False))
    else:
        plan_view.show(study)
    if args.plot is not None:
        from helm.commands.plots import save_plot

        save_plot(study, args.plot)
        if not args.json:
            say(f"[plot: {args.plot}]")
    return 0


def _write(study: Study, args: argparse.Namespace) -> None:
    from helm.model.hub import resolve_config

    if any(tensor.source is None for tensor in study.plan.tensors):
        raise InvalidError(
            "[plan] --write needs the model's weights, since a plan says where each lies; give "
            "their folder, such as `hf download MODEL` prints"
        )
    try:
        Path(args.write).write_text(study.plan.to_json() + "\n", encoding="utf-8")
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
    from helm.compiler.study import Request, study

    if args.context is not None and args.context < 1:
        raise InvalidError(f"[plan] --context is {args.context}; expected at least 1")
    request = Request(
        prompt=args.prompt_tokens,
        output=args.output_tokens,
        batch=args.batch,
        context=args.context,
        objective=args.objective,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        cpu_bytes=options.size(args.ram, "--ram"),
        accelerator_bytes=options.size(args.vram, "--vram"),
        kv=options.kv_options(args),
        page_tokens=args.page_tokens,
        weights=args.weights,
    )
    name, config, tensors, notices = _model(args.model, args.revision)
    profile = _profile(args, notices)
    found = study(name, config, tensors, profile, request)
    notices += profile.notices_of({held.format for held in found.plan.slices})
    said = (as_options(notice) for notice in (*notices, *found.plan.notices))
    plan = dataclasses.replace(found.plan, notices=tuple(said))
    return dataclasses.replace(found, plan=plan)


def _model(
    model: str | None, revision: str | None
) -> tuple[str, ModelConfig, Mapping[str, TensorInfo] | None, list[str]]:
    """(name, configuration, tensors if the weights are there, notices)."""
    from helm.model.families import read_config
    from helm.model.hub import BUNDLED, is_gguf, resolve_config
    from helm.model.model_files import read_model, read_remote_model
    from helm.model.weight_names import read_weights

    path = resolve_config(model, revision)
    if not isinstance(path, Path):
        config, weights = read_remote_model(path)
        return model or "", config, weights.tensors, list(weights.notices)
    if is_gguf(path):
        files = read_model(path)
        here = os.path.exists(os.path.expanduser(model or ""))
        name = printable(path.stem) if here else str(model)
        return name, files.config, files.weights().tensors, []
    config = read_config(path)
    if model is None or model == BUNDLED:
        name = BUNDLED
    elif os.path.exists(os.path.expanduser(model)):
        whole = path.resolve()
        name = printable(whole.parent.name if whole.name == "config.json" else whole.stem)
    else:
        return model, config, None, []  # a Hugging Face id, of which only the config was fetched
    given = os.path.expanduser(model or "")
    if os.path.isfile(given) or not any(path.parent.glob("model*.safetensors*")):
        return name, config, None, []
    try:
        weights = read_weights(path.parent, config)
    except CheckpointError as error:
        return name, config, None, [f"planned from {path.name} alone: {error}"]
    return name, weights.config, weights.tensors, list(weights.notices)


def _profile(args: argparse.Namespace, notices: list[str]) -> Profile:
    from helm.commands.measuring import measured_profile
    from helm.machine.profile import load_profile

    if args.profile is None:
        return measured_profile(args.device, notices)
    if args.device is not None:
        raise InvalidError(
            "[plan] --profile names a machine and --device one of this machine's devices; give "
            "one of them"
        )
    profile = load_profile(args.profile)
    notices += profile.notices
    return profile
