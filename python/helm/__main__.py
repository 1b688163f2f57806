"""`python -m helm`: the same as the helm-llm command."""

from helm.commands.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
