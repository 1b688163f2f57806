"""One bad request of a batch ends alone; the results of the others are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

import helm
import small_models
from helm.text.detokenizer import Detokenizer
from helm.text.tokenizer import Tokenizer

POISON = 100  # whose logits are not finite
PROMPTS = [[3, 17, 99], [5, 7, POISON], [8, 13, 21, 34], [POISON]]


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    module = small_models.make_model("llama")
    with torch.no_grad():
        module.get_input_embeddings().weight[POISON] = float("nan")
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0"))
    with helm.LLM.from_torch(module, tokenizer=Tokenizer(backend)) as loaded:
        yield loaded


def test_logits_that_are_not_finite_end_their_request_alone(llm: helm.LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    alone = [llm.generate(PROMPTS[i], **options).tokens for i in (0, 2)]
    for prompts in (PROMPTS, PROMPTS * 5):  # more than run together
        found = llm.generate(prompts, **options)
        assert [found[i].tokens for i in (0, 2)] == alone
        assert [result.finish_reason for result in found[:4]] == ["length", "error"] * 2
        for bad in (found[1], found[3]):
            assert bad.tokens == []
            assert "logits are not finite" in str(bad.error)
            assert bad.to_dict()["error"] == bad.error
        assert found[0].error is None
    llm._service.close(llm._service.open(llm.context)[0])  # nothing is left open


def test_the_only_request_raises(llm: helm.LLM) -> None:
    for call in (llm.generate, lambda prompt: list(llm.stream(prompt))):
        with pytest.raises(helm.InvalidError, match="logits are not finite"):
            call(PROMPTS[1])  # type: ignore[operator]
    assert llm.generate([PROMPTS[1]])[0].finish_reason == "error"
    assert llm.generate(PROMPTS[0], max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize("method", ["push", "flush"])
def test_text_that_cannot_be_made_ends_its_request_alone(
    llm: helm.LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    expected = llm.generate([PROMPTS[0], PROMPTS[2]], **options)
    whole = getattr(Detokenizer, method)
    made: list[Detokenizer] = []

    def fail(self: Detokenizer, *arguments: int) -> str:
        if self not in made:
            made.append(self)
        if self is made[0]:
            raise RuntimeError("no text")
        return str(whole(self, *arguments))

    monkeypatch.setattr(Detokenizer, method, fail)
    found = llm.generate([PROMPTS[0], PROMPTS[2]], **options)
    assert (found[0].finish_reason, found[0].error) == ("error", "no text")
    assert (found[1].text, found[1].tokens) == (expected[1].text, expected[1].tokens)
    made.clear()
    with pytest.raises(RuntimeError, match="no text"):
        llm.generate(PROMPTS[0], **options)
    llm._service.close(llm._service.open(llm.context)[0])


def test_what_is_saved_is_of_a_request_that_did_not_fail(llm: helm.LLM) -> None:
    found = llm.generate(PROMPTS[:2], max_tokens=3, ignore_eos=True)
    assert llm._last == PROMPTS[0] + found[0].tokens
