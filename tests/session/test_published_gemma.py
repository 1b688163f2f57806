"""A published Gemma 3 in a GGUF file: as it is stored, in f32, and as transformers reads it.

Skipped without the file, see `gguf_models.real`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import gguf_models
import helm

FILE = "gemma-3-270m-Q4_K_M.gguf"
ROOT = Path(__file__).resolve().parents[2]
PAGES = ("LICENSE", "docs/planning.md", "CONTRIBUTING.md", "docs/weights.md")
EACH = 500  # tokens of a page
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Path:
    return gguf_models.real(FILE)


def forced(model: Path, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token: its -log p, the most likely id, and by how much that leads."""
    losses, tops, leads = [], [], []
    with helm.LLM(model, context=EACH + 1, device="cpu", **options) as llm:
        assert llm.tokenizer is not None
        for page in PAGES:
            tokens = llm.tokenizer.encode((ROOT / page).read_text())[: EACH + 1]
            logits = np.asarray(llm.logits(tokens))[:EACH].astype(np.float64)
            top = logits.max(axis=1)
            total = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
            losses.append(total - logits[np.arange(EACH), tokens[1:]])
            tops.append(logits.argmax(axis=1))
            leads.append(top - np.partition(logits, -2, axis=1)[:, -2])
    return tuple(np.concatenate(found) for found in (losses, tops, leads))  # type: ignore[return-value]


def test_four_bits_say_what_the_same_weights_say_in_f32(model: Path) -> None:
    losses, tops, _ = forced(model)
    exact, best, leads = forced(model, dtype="f32", kv_dtype="f32")
    assert np.exp(losses.mean()) == pytest.approx(np.exp(exact.mean()), rel=0.003)
    clear = leads >= 0.5
    assert clear.sum() > 1000
    np.testing.assert_array_equal(tops[clear], best[clear])


def test_greedy_text_is_transformers(model: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with helm.LLM(model, context=128, device="cpu", dtype="f32", kv_dtype="f32") as llm:
        assert llm.tokenizer is not None
        for prompt in ("The capital of France is", "def fibonacci(n):"):
            tokens = llm.tokenizer.encode(prompt)
            with torch.no_grad():
                out = theirs.generate(
                    torch.tensor([tokens]), max_new_tokens=40, do_sample=False, eos_token_id=None
                )
            ours = list(llm.generate(prompt, max_tokens=40, temperature=0).tokens)
            assert len(ours) >= 10
            assert ours == out[0, len(tokens) :][: len(ours)].tolist()
