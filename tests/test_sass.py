"""Machine code of the hot CUDA kernels, as nvcc makes it: no registers spilled, no division by a
call, loads of the merge in batches, prompts in tensor cores. Skipped where nvcc or nvdisasm is
missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from whole import WHOLE

ROOT = Path(__file__).parent.parent
ARCHITECTURE = "sm_90"
# Of the test for spilled registers; HELM_TEST_ARCHITECTURES="sm_75 sm_80" has others.
SPILLING = os.environ.get("HELM_TEST_ARCHITECTURES", "sm_120" if WHOLE else "").split()
HOT = ("attention", "attention_decode", "attention_prefill", "attention_prompt", "matvec")
TRIED = HOT if WHOLE else ("attention", "attention_decode", "matvec")  # the others take a minute
CALLED_DIVISION = re.compile(r"__cuda_sm20_(?:div|rem)\w*")
TIGHT = ("attention_decode", "attention_prompt", "matvec")
OVER_F32 = re.compile(r"(decode|prefill)_kernelILN\w*DTypeE0E")  # pools of f32 are for tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def nvdisasm() -> str | None:
    """On PATH, or from the wheel nvidia-cuda-nvdisasm."""
    found = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    places = [Path(folder, "cu13", "bin", "nvdisasm") for folder in folders]
    return found or next((str(place) for place in places if place.exists()), None)


@pytest.fixture(scope="module", params=TRIED)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, Path]:
    """(name, what ptxas says of every kernel, the machine code)."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    cubin = tmp_path_factory.mktemp("sass") / f"{request.param}.cubin"
    return request.param, compile_kernels(nvcc, request.param, ARCHITECTURE, cubin), cubin


def compile_kernels(nvcc: str, name: str, architecture: str, cubin: Path) -> str:
    """What ptxas says of every kernel in a file."""
    run = subprocess.run(
        ["nice", "-n", "19", nvcc, "-std=c++20", "-cubin", f"-arch={architecture}", "-Xptxas", "-v",
         *(f"-I{ROOT / folder}" for folder in (".", "cuda/hardware", "cpp", "cpp/include")),
         ROOT / "cuda" / "kernels" / f"{name}.cu", "-o", cubin],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stderr


def test_hot_kernels_spill_nothing(compiled: tuple[str, str, Path]) -> None:
    assert spilling(compiled[1]) == [], compiled[0]


@pytest.mark.parametrize("architecture", SPILLING)
@pytest.mark.parametrize("name", TIGHT)
def test_kernels_that_fill_the_registers_spill_nothing(
    name: str, architecture: str, tmp_path: Path
) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    assert spilling(compile_kernels(nvcc, name, architecture, tmp_path / "cubin")) == []


def spilling(said: str) -> list[str]:
    """Kernels that keep registers in memory, but for those over f32."""
    kernels = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        said,
        re.DOTALL,
    )
    assert kernels, said[-4000:]
    spilled = [kernel for kernel, *sizes in kernels if any(int(size) > 0 for size in sizes)]
    return [kernel for kernel in spilled if not OVER_F32.search(kernel)]


def test_what_looks_for_spills_sees_one() -> None:
    said = (
        "ptxas info : Compiling entry function '{}' for 'sm_75'\n"
        "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    )
    assert spilling(said.format("good", 0, 0, 0) + said.format("bad", 8, 4, 4)) == ["bad"]


def test_hot_kernels_divide_without_calls(compiled: tuple[str, str, Path]) -> None:
    name, _, cubin = compiled
    if name == "attention_decode":
        pytest.skip("it calls one before its loop: with any other way it spills (nvcc 13.0)")
    assert CALLED_DIVISION.findall(sass(cubin)) == [], name


def test_the_merge_of_splits_has_its_loads_in_flight_together(
    compiled: tuple[str, str, Path],
) -> None:
    name, _, cubin = compiled
    if name != "attention":
        pytest.skip("of the merge alone")
    code = function(sass(cubin), "merge_splits_kernelILi4E")
    assert longest_batch(code) >= 8


def test_prompt_attention_multiplies_in_tensor_cores_while_copies_are_on_their_way(
    compiled: tuple[str, str, Path],
) -> None:
    """Two multiplications of queries and one of weights for each pair of fragments of K and V."""
    name, _, cubin = compiled
    if name != "attention_prompt":
        pytest.skip("of prompts alone")
    text = sass(cubin)
    for head, keys in ((64, 64), (128, 64), (256, 16)):
        code = function(text, rf"prompt_kernelILN\w*DTypeE2ELi{head}E")
        multiplications = (head // 16) * (keys // 8) * 2 + (keys // 16) * (head // 8)
        assert operations(code, "HMMA.16816.F32.BF16") == multiplications
        assert operations(code, "LDGSTS") > 0
        assert operations(code, "LDSM") > 0
        assert operations(code, "LDL") == 0


def operations(code: str, name: str) -> int:
    return len(re.findall(rf"\b{re.escape(name)}\b", code))


def test_hot_kernels_wait_for_the_kernel_before_what_it_writes_is_read(
    compiled: tuple[str, str, Path],
) -> None:
    name, _, cubin = compiled
    if name in ("attention_prefill", "attention_prompt"):
        pytest.skip("its launches do not overlap")
    functions = dict(re.findall(r"^\.text\.(\w+):$(.*?)(?=^\.text\.|\Z)", sass(cubin), re.M | re.S))
    assert functions
    for kernel, code in functions.items():
        said = re.findall(r"\b(ACQBULK|PREEXIT|LDG[.\w]*|STG[.\w]*)", code)
        waits = [place for place, word in enumerate(said) if word == "ACQBULK"]
        assert waits, kernel
        assert "PREEXIT" in said, kernel
        # A product has one more, for warps without rows, and has its weights on their way before.
        wait = waits[1] if name == "matvec" else waits[0]
        before = [word for word in said[:wait] if word.startswith(("LDG", "STG"))]
        assert all("CONSTANT" in word for word in before), kernel
        vectors = kernel.endswith("Lb1EEEvNS0_10MatvecArgsE")
        assert (len(before) >= 4) == vectors, kernel


def sass(cubin: Path) -> str:
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    run = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def function(text: str, name: str) -> str:
    """The code of the kernel whose mangled name contains `name`."""
    (found,) = re.findall(rf"^\.text\.\w*{name}\w*:$(.*?)(?=^\.text\.|\Z)", text, re.M | re.S)
    return str(found)


def longest_batch(code: str) -> int:
    """The most loads from global memory that begin before any of them is used."""
    most, waiting = 0, set[str]()
    for line in code.splitlines():
        instruction = re.search(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9.]+)\s*(.*?);", line)
        if instruction is None:
            continue
        operation, operands = instruction.groups()
        target, _, sources = operands.partition(",")
        if waiting & set(re.findall(r"\bR\d+\b", sources)):
            waiting.clear()
        if operation.startswith("LDG"):
            waiting.add(target.strip())
            most = max(most, len(waiting))
    return most


def test_what_counts_batches_sees_a_load_that_is_waited_for() -> None:
    def code(*lines: str) -> str:
        return "\n".join(f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))

    load = ["LDG.E R4, desc[UR4][R2.64]", "@P0 LDG.E.CONSTANT R5, desc[UR4][R2.64+0x4]"]
    assert longest_batch(code(*load, "FFMA R8, R4, R5, R8")) == 2
    assert longest_batch(code(load[0], "FFMA R8, R4, R9, R8", load[1], "FFMA R8, R5, R9, R8")) == 1
