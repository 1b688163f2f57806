#!/usr/bin/env bash
# Checks and measures HELM on this machine's NVIDIA GPU, without network:
#
#   tests/gpu/run.sh OUT [STEP...]
#
# Steps, in order; all by default, each under its own time limit, under eight minutes in all:
#   build        the plugin for this GPU only, native tests, benchmarks
#   conformance  the device and its stages against the scalar oracle, on the GPU, and engines whose KV
#                pages overflow into host memory
#   memcheck     the former under compute-sanitizer, if it is installed
#   bench        helm-bench-cuda, if it was built
#   package      pip install of the whole of HELM into OUT/site, and a look at its plugin
#   models       that package: every family at every cut gives the tokens of the CPU
#   partitioned  bench/partitioned.py: Qwen3-8B's shape in 8 GiB
# and, only if asked for, in up to five minutes more:
#   larger       bench/partitioned.py: Qwen3-14B's and Qwen3-32B's shapes in 24 GiB
# A log of each step, its results and summary.json go to OUT; a table comes last. The status is that
# of the worst step. CUDA 13's nvcc, cmake, ninja and python3 are needed, and headers of two
# libraries, which may also be named:
#   HELM_JSON_INCLUDE     directory that holds nlohmann/json.hpp
#   HELM_DOCTEST_INCLUDE  directory that holds doctest/doctest.h
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,22p' "$0"; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
build=build/gpu
all_steps=(build conformance memcheck bench package models partitioned)
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=("${all_steps[@]}")

missing() {
  echo "tests/gpu/run.sh: $1" >&2
  exit 2
}
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
for tool in nvidia-smi nvcc cmake ninja python3; do
  command -v "$tool" >/dev/null || missing "$tool is not on PATH"
done

options=(-DHELM_CUDA=ON -DHELM_CUDA_ARCHITECTURES=native)
if [ -n "${HELM_JSON_INCLUDE:-}" ]; then
  options+=("-DHELM_JSON_INCLUDE=$HELM_JSON_INCLUDE")
elif ! python3 -c 'import nlohmann_json' 2>/dev/null && [ ! -f /usr/include/nlohmann/json.hpp ]; then
  missing "nlohmann/json.hpp was not found: set HELM_JSON_INCLUDE to the directory that holds nlohmann/"
fi
if [ -n "${HELM_DOCTEST_INCLUDE:-}" ]; then
  options+=("-DHELM_DOCTEST_INCLUDE=$HELM_DOCTEST_INCLUDE")
elif [ ! -f /usr/include/doctest/doctest.h ]; then
  missing "doctest/doctest.h was not found: set HELM_DOCTEST_INCLUDE to the directory that holds doctest/"
fi
# Where the nvidia-cublas wheel has its libraries; empty if it is not installed.
cublas=$(python3 -c '
import pathlib, sys
found = [p for p in sys.path if (pathlib.Path(p) / "nvidia/cu13/lib/libcublas.so.13").exists()]
print(found[0] + "/nvidia/cu13/lib" if found else "")')
[ -z "$cublas" ] || export HELM_TEST_CUBLAS=$cublas

step_build() {
  cmake -S . -B "$build" -G Ninja -DHELM_TESTS=ON -DHELM_BENCH=ON "${options[@]}" &&
    cmake --build "$build"
}
step_conformance() {
  "$build/tests/native/helm_cuda_gpu_tests" && "$build/tests/native/helm_cuda_gpu_engine_tests"
}
step_memcheck() {
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; return 77; }
  compute-sanitizer --error-exitcode 1 "$build/tests/native/helm_cuda_gpu_tests"
}
step_bench() {
  local bench
  bench=$(find "$build" -name helm-bench-cuda -type f | head -1)
  [ -n "$bench" ] || { echo "helm-bench-cuda was not built"; return 77; }
  "$bench" --json "$out/bench.json"
}
step_package() {
  python3 -m pip install -q --no-build-isolation --no-deps --no-index --target "$out/site" . \
    "${options[@]/#-D/-Ccmake.define.}" && ls -l "$out"/site/helm/lib*/libhelm_cuda.so
}
installed() {
  export PYTHONPATH="$out/site${PYTHONPATH:+:$PYTHONPATH}"
  python3 -c "import helm, $1" || { echo "the step package, and $1 are needed"; return 77; }
}
step_models() {
  installed "pytest, torch, transformers" || return
  HELM_TEST_DEVICE=cuda python3 -m pytest -q -p no:cacheprovider tests/test_partition.py
}
step_partitioned() {
  installed "numpy, rich" || return
  python3 bench/partitioned.py --device cuda --shapes qwen3-8b --vram 8GiB \
    --json "$out/partitioned-8b.json"
}
step_larger() {
  installed "numpy, rich" || return
  python3 bench/partitioned.py --device cuda --shapes qwen3-14b qwen3-32b --vram 24GiB \
    --json "$out/partitioned-larger.json"
}
limit_of() {
  case $1 in
    build) echo 120 ;;
    conformance) echo 34 ;;
    memcheck) echo 30 ;;
    bench) echo 60 ;;
    package) echo 75 ;;
    models) echo 45 ;;
    partitioned) echo 115 ;;
    larger) echo 300 ;;
    *) return 1 ;;
  esac
}

nvidia-smi >"$out/machine.txt"
export -f step_build step_conformance step_memcheck step_bench step_package step_models \
  step_partitioned step_larger installed
worst=0
results=()
for step in "${steps[@]}"; do
  limit=$(limit_of "$step") || missing "there is no step \"$step\"; steps are ${all_steps[*]} partitioned"
  begin=$SECONDS
  out=$out build=$build timeout "$limit" bash -c \
    'set -uo pipefail; step=$1; shift; options=("$@"); "step_$step"' _ "$step" "${options[@]}" \
    >"$out/$step.log" 2>&1
  status=$?
  case $status in
    0) verdict=passed ;;
    77) verdict="skipped: $(tail -1 "$out/$step.log")" ;;
    124) verdict="failed: took more than $limit s" worst=1 ;;
    *) verdict="failed: see $step.log" worst=1 ;;
  esac
  case $verdict in failed*) tail -40 "$out/$step.log" ;; esac
  results+=("$step" $((SECONDS - begin)) "$verdict")
done

python3 - "$out/summary.json" "${results[@]}" <<'PYTHON'
import json, subprocess, sys
rows = [dict(step=s, seconds=int(t), result=r)
        for s, t, r in zip(*[iter(sys.argv[2:])] * 3)]
query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
with open(sys.argv[1], "w") as file:
    json.dump({"gpu": gpu, "steps": rows}, file, indent=1)
print(gpu)
for row in rows:
    print(f"{row['step']:<12} {row['seconds']:4d} s  {row['result']}")
PYTHON
exit $worst
