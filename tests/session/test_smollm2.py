"""SmolLM2-135M-Instruct beside transformers: text of prompts and conversations, logits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import helm
import smollm2

RAW = (
    "Water boils at",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
)
CHATS = (
    [{"role": "user", "content": "Name three rivers of Europe."}],
    [{"role": "user", "content": "What is 7 times 8?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada! How can I help?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Write a Python function that adds two numbers. 😀 naïve"}],
)
TOKENS = 16
torch.set_num_threads(1)
_EPS = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}  # of one rounding
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


@functools.cache
def reference(dtype: str = "f32") -> Any:
    """transformers' model in f32, of weights as `dtype` holds them."""
    found = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.folder(), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return found.to(_DTYPES[dtype]).float() if dtype in _DTYPES else found


def expected_logits(tokens: list[int], dtype: str = "f32", rows: int = 0) -> np.ndarray[Any, Any]:
    """Of the last `rows` positions, or of all."""
    with torch.no_grad():
        return reference(dtype)(torch.tensor([tokens]), logits_to_keep=rows).logits[0].numpy()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2.folder())


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Ten prompts as transformers' tokenizer has them."""
    chats = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in CHATS
    ]
    return [*(tokenizer(text).input_ids for text in RAW), *chats]


def test_greedy_text_is_that_of_transformers(tokenizer: Any, prompts: list[list[int]]) -> None:
    with helm.LLM(smollm2.folder(), dtype="f32", context=512) as llm:
        found = llm.generate(list(RAW), temperature=0, max_tokens=TOKENS)
        found += [llm.chat(chat, temperature=0, max_tokens=TOKENS) for chat in CHATS]
    for prompt, completion in zip(prompts, found, strict=True):
        tokens = completion.tokens
        assert completion.prompt_tokens == len(prompt)
        assert len(tokens) == TOKENS or completion.finish_reason == "stop"
        # Greedy: each token is the likeliest after the prompt and the tokens before it.
        logits = expected_logits(prompt + tokens[:-1], rows=len(tokens))
        assert tokens == logits.argmax(1).tolist(), tokenizer.decode(prompt)
        shown = tokens[:-1] if completion.finish_reason == "stop" else tokens
        assert completion.text.strip() == tokenizer.decode(shown).strip()


def test_logits_in_f32_are_those_of_transformers(prompts: list[list[int]]) -> None:
    """A logit sums over `intermediate_size` terms twice per layer; its roundings add up like the
    steps of a random walk."""
    with helm.LLM(smollm2.folder(), dtype="f32", context=512) as llm:
        terms = 2 * llm.config.num_hidden_layers * llm.config.intermediate_size
        for prompt in (prompts[2], prompts[8]):
            expected = expected_logits(prompt)
            bound = 2 * _EPS["f32"] * terms**0.5 * np.abs(expected).max()
            error = np.abs(llm.logits(prompt) - expected).max()
            assert error <= bound, (error, bound)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_logits_in_16_bits_are_off_by_the_rounding_of_the_cache(
    dtype: str, prompts: list[list[int]]
) -> None:
    """Beside transformers with the same weights in f32: K and V of each layer are rounded once."""
    expected = expected_logits(prompts[8], dtype)
    with helm.LLM(smollm2.folder(), dtype=dtype, context=512) as llm:
        roundings = 2 * llm.config.num_hidden_layers
        bound = _EPS[dtype] * roundings**0.5 * np.abs(expected).max()
        error = np.abs(llm.logits(prompts[8]) - expected).max()
    assert error <= bound, (error, bound)
