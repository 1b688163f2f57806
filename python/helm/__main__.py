"""`python -m helm`: the same as the helm-llm command."""

from helm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
