"""Which engines this machine can measure, what machine it is, what results keep of a command."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from helm import __version__, _helm
from helm.compiler.load_cost import WEIGHTS
from helm.machine.resources import cpu_model
from scenarios import ONE_THREAD, family, variant
from synthetic import BYTES

# family -> the modules that measuring it takes, its variants.
PEERS = {
    "llama.cpp": (("llama_cpp", "gguf", "torch"), ("", "fa", "no-fa", ONE_THREAD)),
    "transformers": (("transformers", "torch"), ("", "f32")),
}


# Arguments that name files and folders, or say how results are shown. What is in a profile is
# published with the results, and a shape by the name that it has there.
PLACES = ("root", "scratch", "profile", "shapes", "json", "files", "markdown", "plot")


def default_engines(dtype: str) -> list[str]:
    """Of blocks, HELM and llama.cpp in all its settings. Else HELM as it comes and on AVX2; where
    weights are bf16 also in every other tier above, since some round activations and some do not;
    each peer as it comes and in another setting."""
    if dtype not in BYTES:  # blocks of a GGUF file
        return ["helm", "llama.cpp", "llama.cpp:no-fa", f"llama.cpp:{ONE_THREAD}"]
    tiers = [tier["name"] for tier in _helm.isa_tiers() if tier["available"]]
    others = tiers[tiers.index("avx2") :] if "avx2" in tiers else []
    if dtype != "bf16":
        others = others[:1]
    named = [f"helm:{tier}" for tier in others if tier != _helm.isa_choice()[0]]
    return ["helm", *named, "llama.cpp", "llama.cpp:no-fa", "transformers", "transformers:f32"]


def why_not(engine: str) -> str:
    """Why an engine cannot be measured here, or nothing. SystemExit for one that does not exist."""
    name, setting = family(engine), variant(engine)
    if name == "helm":
        if "HELM_CPU_ISA" in os.environ:
            raise SystemExit(
                f"[bench] HELM_CPU_ISA is set to {os.environ['HELM_CPU_ISA']!r}; unset it and name "
                "tiers as engines, e.g. --engines helm helm:avx2"
            )
        tiers = {tier["name"]: tier for tier in _helm.isa_tiers()}
        if setting in WEIGHTS:
            return ""
        if setting and setting not in tiers:
            raise SystemExit(
                f"[bench] no engine {engine!r}; tiers are {', '.join(tiers)}, ways to load weights "
                f"{', '.join(WEIGHTS)}"
            )
        return "" if not setting or tiers[setting]["available"] else tiers[setting]["reason"]
    if name not in PEERS or setting not in PEERS[name][1]:
        raise SystemExit(
            f"[bench] no engine {engine!r}; expected helm[:TIER|:WEIGHTS], "
            f"llama.cpp[:fa|:no-fa|:{ONE_THREAD}] or transformers[:f32]"
        )
    missing = [m for m in PEERS[name][0] if importlib.util.find_spec(m) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def machine(args: argparse.Namespace) -> dict[str, object]:
    """What the figures were measured on. args: `threads`."""
    versions = {"helm": __version__}
    for distribution in ("llama-cpp-python", "transformers", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            versions[distribution] = version(distribution)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "cpu": cpu_model(),
        "isa": _helm.isa_choice()[0],
        "tiers": [tier["name"] for tier in _helm.isa_tiers() if tier["available"]],
        "threads": args.threads,
        "helm": __version__,
        "versions": versions,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """What was asked for, as published with results: without anybody's folders."""
    return {name: value for name, value in vars(args).items() if name not in PLACES}
