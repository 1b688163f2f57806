"""The subcommands of helm-llm, one module each."""
