"""The model inside the package: its files, its text and its chat format."""

import hashlib
import os
import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "python" / "helm" / "bundled"
sys.path.insert(0, str(ROOT / "tools"))

from story_grammar.corpus import BEGIN, END, documents, render_talk  # noqa: E402
from story_grammar.story import PLOTS, TRAIT_LINES, tell_story  # noqa: E402
from story_grammar.words import TRAITS  # noqa: E402

TALK = [
    {"role": "user", "content": "Tell me a story about a fox and a lamp."},
    {"role": "assistant", "content": "Once upon a time, there was a fox."},
    {"role": "user", "content": "What happened next?"},
]


def load(kind: str):
    """The bundled tokenizer or model through transformers, or a skip."""
    pytest.importorskip("torch", reason="torch is needed to run the reference model")
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    return getattr(transformers, kind).from_pretrained(BUNDLED)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    ],
)
def test_file_is_bundled(name: str) -> None:
    assert (BUNDLED / name).stat().st_size > 0


def test_weights_are_one_to_two_megabytes() -> None:
    assert 1_000_000 <= (BUNDLED / "model.safetensors").stat().st_size <= 2_000_000


def test_corpus_is_deterministic() -> None:
    def digest(seed: int) -> str:
        return hashlib.sha256("\n".join(islice(documents(seed), 50)).encode()).hexdigest()

    assert digest(7) == digest(7)
    assert digest(7) != digest(8)
    assert digest(7) == "bfb1bd8c8df4f005a91e3c51fe87361c64a6d1a466048e52ff992e29d725c101"


def test_every_plot_fills_all_its_slots() -> None:
    rng = random.Random(3)
    assert len(PLOTS) >= 12
    assert set(TRAITS) == set(TRAIT_LINES)
    for plot in PLOTS:
        for _ in range(50):
            story = tell_story(rng, plot=plot)
            assert not re.search(r"[{}\[\]|@]|\?\s*$|  | \?", story.text), story.text
            for key in ("problem", "ending", "solver"):
                assert "{" not in story.line(plot.header[key][0], rng)


@pytest.mark.parametrize(
    "text", ["Once upon a time", "naïve café, 東京 🙂\n\ttab", " two  spaces "]
)
def test_any_text_round_trips(text: str) -> None:
    tokenizer = load("AutoTokenizer")
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders_the_training_format() -> None:
    tokenizer = load("AutoTokenizer")
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == render_talk(TALK)
    prompt = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert prompt == render_talk(TALK) + "<|assistant|>"
    system = [{"role": "system", "content": "Be brief."}]
    assert tokenizer.apply_chat_template(system + TALK, tokenize=False) == render_talk(TALK)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids(BEGIN)) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids(END)) == len(TALK)


def generate(prompt: str, new_tokens: int) -> tuple[list[int], str]:
    """Greedy tokens after the prompt, and their text."""
    tokenizer, model = load("AutoTokenizer"), load("LlamaForCausalLM")
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=BEGIN not in prompt)
    output = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    new = output[0, ids["input_ids"].shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def test_greedy_story_is_made_of_known_words_and_ends() -> None:
    known = {word for text in islice(documents(9), 3000) for word in words_of(text)}
    new, text = generate("Once upon a time", 300)
    eos = load("LlamaForCausalLM").generation_config.eos_token_id
    assert new[-1] in (eos if isinstance(eos, list) else [eos])
    told = words_of(text)
    assert len(told) > 60
    assert sum(word in known for word in told) >= 0.98 * len(told)


def test_chat_tells_the_story_that_was_asked_for() -> None:
    _, story = generate(render_talk(TALK[:1]) + "<|assistant|>", 300)
    assert "fox" in story
    assert "lamp" in story


def test_the_readme_s_python_prints_what_stands_below_it() -> None:
    """In the baseline isa, whose sums are the same on every machine."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((program, shown),) = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", readme, re.S)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "HELM_CPU_ISA": "scalar"},
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.stdout.strip() == shown.strip()
