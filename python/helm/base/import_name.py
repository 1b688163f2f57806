"""Whether another package of this environment has the import name helm too."""

from __future__ import annotations

OTHER = "crfm-helm"  # Stanford's benchmark, whose helm/__init__.py hides HELM's


def clash() -> str | None:
    """What is wrong where it is installed too, and the remedy."""
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms

    try:
        found = version(OTHER)
    except PackageNotFoundError:
        return None
    return (
        f"[install] {OTHER} {found} is in this environment and has the import name helm too, so "
        "that files of one hide the other's; install helm-llm into a fresh one (python3 -m venv)"
    )
