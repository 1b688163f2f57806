"""The command as users run it: pipes, terminals, Ctrl-C, exit statuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from command import PROMPT, Terminal, helm, piped
from device_profiles import fast_accelerator
from helm.machine.devices import find_accelerator
from helm.model.hub import bundled_model

SUMMARY = (
    r"\[prompt \d+ tokens.*tokens/s \| first token .* ms \| output \d+ tokens?.*GB/s"
    r"( \| \d+ of \d+ threads: others are busy)?( \| \d+ of \d+ guesses right)? \| \w+\]"
)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model slow enough to be interrupted, which never ends by itself."""
    folder = tmp_path_factory.mktemp("endless")
    hidden, inner, layers, vocab = 512, 1536, 12, 1024
    config = json.loads((bundled_model() / "config.json").read_text())
    config |= {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "eos_token_id": None,
        "max_position_embeddings": 16384, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, folder)
    rng = np.random.default_rng(0)
    ones = np.ones(hidden, np.float16)

    def matrix(rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
        return (0.05 * rng.standard_normal((rows, columns), np.float32)).astype(np.float16)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": ones}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{name}.weight"] = ones
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{block}.self_attn.{name}.weight"] = matrix(hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{block}.mlp.{name}.weight"] = matrix(inner, hidden)
        tensors[f"{block}.mlp.down_proj.weight"] = matrix(hidden, inner)
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- run -----------------------------------------------------------------------------------------


def test_run_without_arguments() -> None:
    result = helm("run")
    assert len(result.stdout) > 100
    plan, summary = result.stderr.splitlines()
    assert re.fullmatch(
        r"\[plan: bundled .* parameters \| weights .* \| KV .* threads?, .*\]", plan
    )
    assert re.fullmatch(SUMMARY, summary), summary


def test_run_takes_prompts_from_everywhere(tmp_path: Path) -> None:
    model = str(bundled_model())
    expected = helm("run", model, "The dog", "--max-tokens", "12").stdout
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"The dog\n")
    for arguments, stdin in (
        (["run", "bundled", "The dog"], ""),
        (["run", model, "--file", str(path)], ""),
        (["run", model, "-"], "The dog\n"),
        (["run", "--file", str(path)], ""),
        (["run", "bundled", "-q", "The dog"], ""),
        (["run", "-q", "bundled", "--seed", "1", "-"], "The dog\n"),
        (["run", "-q", model, "--seed", "1", "--", "The dog"], ""),
    ):
        assert helm("run", "--max-tokens", "12", *arguments[1:], stdin=stdin).stdout == expected


def test_run_json() -> None:
    result = helm("run", "bundled", "The dog", "--max-tokens", "5", "--json")
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert found["text"] == helm("run", "bundled", "The dog", "--max-tokens", "5").stdout[:-1]
    assert len(found["tokens"]) == 5
    assert found["plan"].startswith("[plan: bundled")
    assert found["timings"]["decode_tokens_per_s"] > 0


def test_run_options_reach_the_model() -> None:
    base = ["run", "bundled", "The dog", "--max-tokens", "12", "-q"]
    greedy = helm(*base).stdout
    seeded = [*base, "--temperature", "2", "--top-k", "50", "--top-p", "0.99", "--min-p", "0.01"]
    first = helm(*seeded, "--seed", "1").stdout
    assert helm(*seeded, "--seed", "1").stdout == first
    assert first != greedy
    assert helm(*base, "--stop", greedy[4:7]).stdout == greedy[: greedy.find(greedy[4:7])] + "\n"
    longer = ["run", "bundled", "The dog", "--max-tokens", "60", "-q"]
    assert helm(*longer, "--repetition-penalty", "5").stdout != helm(*longer).stdout
    single = helm(*base[:-1], "--threads", "1", "--dtype", "f32", "--kv-dtype", "f16")
    assert re.search(r"weights .* f32, copied \| KV f16.* 1 thread,", single.stderr)


def test_output_is_quiet_when_asked() -> None:
    assert helm("run", "-q", "--max-tokens", "2").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "./absent"], "no folder ./absent"),
        (["run", "org/not-cached"], "HF_HUB_OFFLINE is set"),
        (["run", "bundled", ""], "prompt is empty"),
        (["run", "bundled", "x", "--temperature", "nan"], "temperature must be"),
        (["run", "bundled", "x", "--max-tokens", "0"], "--max-tokens must be"),
        (["run", "bundled", "x", "--context", "99999"], "context of 99999"),
        (["run", "bundled", "dog " * 2000], "the context holds"),
        (["run", "bundled", "x", "--file", "y"], "not both"),
        (["run", "--file", "./absent"], "cannot read ./absent"),
        (["run", "bundled", "x", "--threads", "0"], "threads must be"),
        (["run", "/etc/passwd"], "is a file"),
        (["run", "bundled", "x", "--revision", "v1"], "revision"),
        (["run", "bundled", "x", "--temperature", "-1"], "temperature must be"),
        (["run", "--file", os.devnull], "prompt is empty"),
        (["run", "bundled", "-"], "prompt is empty"),
        (["run", "bundled", os.fsdecode(b"ab\xff")], "not UTF-8 text (byte 2)"),
        (["chat", "./absent"], "no folder"),
        (["chat", "--max-tokens", "0"], "--max-tokens must be"),
        (["bench", "--rounds", "0"], "--rounds is 0"),
    ],
)
def test_bad_input_is_one_error_line_and_status_2(arguments: list[str], message: str) -> None:
    result = helm(*arguments, status=2)
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    loaded = "the context holds" in message  # which takes the model's tokenizer
    last = rest[-1] if loaded else first
    assert loaded or not rest, "it was found before the model was loaded"
    assert last.startswith("error: ")
    assert message in last


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    assert "not UTF-8 text (byte 2)" in helm("run", "--file", str(path), status=2).stderr


def test_usage_errors_and_help() -> None:
    for arguments, message, command in (
        ([], "the following arguments are required: COMMAND", ""),
        (["fly"], "invalid choice: 'fly'", ""),
        (["run", "--max-tokens", "many"], "--max-tokens: invalid int value", " run"),
        (["run", "bundled", "The dog", "--warm"], "unrecognized arguments: --warm", " run"),
        (["run", "bundled", "-q", "The dog", "barks"], "unrecognized arguments: barks", " run"),
        (["chat", "bundled", "-q", "Hello", "you"], "unrecognized arguments: you", " chat"),
    ):
        (line,) = helm(*arguments, status=2).stderr.splitlines()
        assert re.fullmatch(rf"error: .*{re.escape(message)}.*; see helm-llm{command} --help", line)
    assert "examples:" in helm("--help").stdout
    assert re.fullmatch(r"helm-llm \d+\.\d+.*\n", helm("--version").stdout)
    for command in ("run", "chat", "doctor"):
        assert "examples:" in helm(command, "--help").stdout


def test_a_reader_that_leaves_ends_it_quietly(endless: Path) -> None:
    with piped("run", str(endless), "--max-tokens", "16000") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_text_streams_as_it_is_generated_and_ctrl_c_sums_up(endless: Path) -> None:
    with piped("run", str(endless), "--max-tokens", "16000") as process:
        assert process.stdout is not None
        assert process.stdout.read(200)  # several tokens, which arrive before the rest
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
    summary = errors.decode().splitlines()[-1]
    assert re.fullmatch(SUMMARY, summary), summary
    assert summary.endswith("cancelled]")
    assert "Traceback" not in errors.decode()


def test_run_on_a_terminal(endless: Path) -> None:
    with Terminal(["run", "--max-tokens", "8"]) as terminal:
        terminal.wait_for(r"\[plan: bundled.*Once upon a time.*\[prompt \d+ tokens")
        assert terminal.status() == 0
    with Terminal(["run", str(endless), "--raw", "Once", "-n", "16000"]) as terminal:
        terminal.wait_for(r"\[plan.*Once.{20}")
        terminal.type("\x03")
        terminal.wait_for(r"cancelled\]")
        assert terminal.status() == 130


# --- devices -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile file by which everything that fits goes to the accelerator."""
    path = tmp_path_factory.mktemp("profile") / "fast.json"
    path.write_text(fast_accelerator().to_json())
    return str(path)


def test_run_on_a_device_gives_the_same_text(fast: str) -> None:
    base = ["run", "bundled", "The dog", "--max-tokens", "12"]
    expected = helm(*base, "--device", "cpu")
    result = helm(*base, "--device", "sim", "--profile", fast)
    assert result.stdout == expected.stdout
    plan, note, summary = result.stderr.splitlines()
    assert re.search(r"\| sim embedding \+ layers 0-4 \+ head, 1\.9 MiB, .* \| predicted", plan)
    assert "the rates of rtx-4090-24gb-ddr5, another machine" in note
    assert re.fullmatch(SUMMARY, summary), summary


def test_run_json_says_what_lies_where(endless: Path, fast: str) -> None:
    base = ["run", str(endless), "The dog", "--max-tokens", "6", "--json"]
    alone = json.loads(helm(*base, "--device", "cpu").stdout)
    assert [use["device"] for use in alone["devices"]] == ["cpu"]
    work = [
        "--context",
        "512",
        "--prompt-tokens",
        "64",
        "--output-tokens",
        "16",
        "--objective",
        "decode",
    ]
    shared = json.loads(helm(*base, *work, "--device", "sim:vram=620MiB", "--profile", fast).stdout)
    cpu, own = shared["devices"]
    assert (cpu["kind"], own["kind"]) == ("cpu", "sim")
    assert cpu["units"]
    assert own["units"]
    assert own["peak_bytes"] <= 620 << 20
    assert f"sim {' + '.join(own['units'])}" in shared["plan"]
    assert shared["predicted_decode_tokens_per_s"] > 0
    assert shared["tokens"] == alone["tokens"]


def test_chat_on_a_device(fast: str) -> None:
    base = ["chat", "bundled", "--max-tokens", "10", "--temperature", "0", "--verbose"]
    lines = "Hello\nTell me more\n"
    result = helm(*base, "--device", "sim", "--profile", fast, stdin=lines)
    assert result.stdout == helm(*base, "--device", "cpu", stdin=lines).stdout
    assert re.search(r"\([1-9]\d* reused\)", result.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--device", "tpu"], 'unknown device "tpu"'),
        (["run", "--device", "sim:link=fast"], 'link is "fast", expected a rate'),
        (["chat", "--device", "sim:speed=1"], 'unknown option "speed"'),
        (["plan", "--device", "tpu"], 'unknown device "tpu"'),
        (["profile", "--device", "tpu"], 'unknown device "tpu"'),
        (["plan", "--device", "sim", "--profile", "thesis-4060"], "give one of them"),
        (["run", "--device", "cpu", "--vram", "2GiB"], "on the CPU alone"),
        (["run", "--device", "sim", "--vram", "lots"], "--vram is 'lots'"),
        (["run", "--device", "sim", "--profile", "absent"], "neither a preset nor a file"),
        (["run", "--device", "sim", "--profile", "cpu-laptop-16gb"], "has no accelerator"),
        (["run", "--batch", "0"], "--batch must be"),
    ],
)
def test_a_device_that_cannot_be_used_is_one_error_line(arguments: list[str], message: str) -> None:
    result = helm(*arguments, status=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_cuda_is_never_replaced_silently() -> None:
    if find_accelerator(None) is not None:
        pytest.skip("a CUDA device can be opened")
    for command in ("run", "chat", "plan", "profile"):
        result = helm(command, "--device", "cuda", status=2)
        assert re.fullmatch(r"(?i)error: \[\w+\] .*(cuda|nvidia).*\n", result.stderr)


# --- chat ----------------------------------------------------------------------------------------


def test_chat_on_a_terminal(endless: Path) -> None:
    with Terminal(["chat", str(endless)]) as terminal:
        terminal.wait_for(rf"\[plan.*{PROMPT}")
        for words in ("Hello", "Again"):
            terminal.type(f"{words}\n")
            terminal.wait_for(rf"{words}.*\?2004l.{{20}}")
            terminal.type("\x03")  # stops the answer, not the chat
            terminal.wait_for(rf"\(stopped\).*{PROMPT}")
        terminal.type("x\x03")  # gives up the line, not the chat
        terminal.wait_for(PROMPT)
        terminal.type("\x03")
        terminal.wait_for(rf"\(Ctrl-C again, Ctrl-D or /bye leaves\).*{PROMPT}")
        terminal.type("\x03")
        assert terminal.status() == 0
    with Terminal(["chat", str(endless)]) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hello\n")
        terminal.wait_for(r"\?2004l.{20}")
        terminal.type("\x03")
        terminal.wait_for(PROMPT)
        terminal.type("\x03")  # the second one, and nothing is typed
        assert terminal.status() == 0
    with Terminal(["chat", str(endless)]) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.status() == 0


# --- doctor --------------------------------------------------------------------------------------


INTEGER_FLAGS = {  # of /proc/cpuinfo, that each table of products in 8 and 4 bits needs
    "scalar": [],
    "avx2": ["avx2", "fma", "f16c"],
    "avxvnni": ["avx2", "fma", "f16c", "avx_vnni"],
    "avx512vnni": ["avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_vnni"],
}


def test_doctor_says_which_integer_kernels_run() -> None:
    text, report = helm("doctor").stdout, json.loads(helm("doctor", "--json").stdout)
    isa = report["integer_isa"]
    available = [tier["name"] for tier in isa["tiers"] if tier["available"]]
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = set(file.read().split())
    assert [tier["name"] for tier in isa["tiers"]] == list(INTEGER_FLAGS)
    assert available == [name for name, needs in INTEGER_FLAGS.items() if flags.issuperset(needs)]
    assert isa["chosen"] == available[-1]
    assert isa["reason"].startswith(f"{available[-1]}, the best")
    said = text[text.index("8 and 4 bits") : text.index("memory")]
    assert re.match(rf"8 and 4 bits +{available[-1]}, the best", said)
    for tier in isa["tiers"]:
        yes = "yes" if tier["available"] else "no"
        assert re.search(rf"^  {tier['name']} +{yes}: {re.escape(tier['reason'])}", said, re.M)


def test_doctor_says_what_was_asked_of_integer_kernels() -> None:
    asked = json.loads(helm("doctor", "--json", HELM_CPU_INT="scalar").stdout)
    assert asked["integer_isa"]["chosen"] == "scalar"
    assert asked["integer_isa"]["reason"] == "scalar, asked for by HELM_CPU_INT"
    bounded = json.loads(helm("doctor", "--json", HELM_CPU_ISA="scalar").stdout)
    assert bounded["integer_isa"]["chosen"] == "scalar"
    wrong = json.loads(helm("doctor", "--json", HELM_CPU_INT="best").stdout)
    assert wrong["integer_isa"]["chosen"] is None
    assert "HELM_CPU_INT=best: there are no such kernels" in wrong["integer_isa"]["reason"]
    assert wrong["isa"]["chosen"] is not None


def test_doctor() -> None:
    text = helm("doctor").stdout
    rows = (
        "HELM",
        "CPU",
        "cores",
        "threads",
        "kernels",
        "memory",
        "huge pages",
        "GPU",
        "devices",
        "cuda",
    )
    for row in (*rows, "tokenizers"):
        assert re.search(rf"^\s*{row}\s+\S", text, re.M), row
    report = json.loads(helm("doctor", "--json").stdout)
    assert report["isa"]["chosen"] in {tier["name"] for tier in report["isa"]["tiers"]}
    assert report["machine"]["memory_bytes"] > 0
    assert 1 <= report["threads"]["threads"] <= report["machine"]["threads"]
    assert report["isa"]["reason"]
    devices = {device["name"]: device for device in report["devices"]}
    assert devices["cpu"]["available"]
    assert devices["sim"]["available"]
    assert devices["cuda"]["available"] == (find_accelerator(None) is not None)
    wrong = helm("doctor", HELM_CPU_ISA="best").stdout
    assert re.search(r"^kernels +none: .*HELM_CPU_ISA=best: no such tier", wrong, re.M)
    assert json.loads(helm("doctor", "--json", HELM_CPU_ISA="best").stdout)["isa"]["chosen"] is None
    assert report["machine"]["nvidia"]["found"] or report["machine"]["nvidia"]["reason"]
