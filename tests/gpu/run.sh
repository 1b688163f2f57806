#!/usr/bin/env bash
# Checks and measures HELM on this machine's NVIDIA GPU, without network: run.py beside this file says how.
exec python3 "$(dirname "$0")/run.py" "$@"
