#!/usr/bin/env bash
# Collects the headers that run.sh needs into build/gpu-headers, where there is network, to go along
# to a machine with a GPU and without: nlohmann/json.hpp from the Python package nlohmann-json,
# doctest/doctest.h from Debian's doctest-dev or the folder HELM_DOCTEST_INCLUDE.
set -euo pipefail
cd "$(dirname "$0")/../.."
headers=build/gpu-headers
doctest=${HELM_DOCTEST_INCLUDE:-/usr/include}/doctest/doctest.h
if [ ! -f "$doctest" ]; then
  echo "headers.sh: $doctest does not exist; apt-get install doctest-dev, or set HELM_DOCTEST_INCLUDE" >&2
  exit 1
fi
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
python3 -m pip download -q --disable-pip-version-check --no-deps -d "$package" "nlohmann-json>=3.11"
python3 -m zipfile -e "$package"/nlohmann_json-*.whl "$package"
rm -rf "$headers"
mkdir -p "$headers/doctest"
cp -r "$package/nlohmann_json/include/nlohmann" "$headers/"
cp "$doctest" "$headers/doctest/"
ls "$headers/nlohmann/json.hpp" "$headers/doctest/doctest.h"
