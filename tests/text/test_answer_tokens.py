"""Prompts of conversations whose messages bring the tokens that they were generated as."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import helm
import small_tokenizers
from helm.text.prompts import Template


@pytest.fixture(scope="module")
def llm() -> Iterator[helm.LLM]:
    with helm.LLM(kv_dtype="f32") as loaded:
        yield loaded


def test_messages_may_bring_their_tokens(llm: helm.LLM) -> None:
    """Where they are the content, in ids that the tokenizer would not choose; else they are not
    heeded."""
    assert llm.tokenizer is not None
    content = "Once upon a time"
    ids = llm.tokenizer.encode(content, add_special_tokens=False)
    letters = [i for c in content for i in llm.tokenizer.encode(c, add_special_tokens=False)[-1:]]
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content},
            {"role": "user", "content": "Go on"}]  # fmt: skip
    text = llm.tokenizer.render_chat(talk)
    whole = llm.tokenizer.encode(text, add_special_tokens=False)

    def prompt(tokens: object) -> list[int]:
        given = [talk[0], {**talk[1], "tokens": tokens}, talk[2]]
        return Template().tokens(llm.tokenizer, given)  # type: ignore[arg-type]

    assert prompt(ids) == whole
    assert prompt([*ids, llm.tokenizer.eos_token_id]) == whole
    assert prompt(None) == whole
    assert prompt(ids[:-2]) == whole
    assert prompt([]) == whole
    own = prompt(letters)
    assert own != whole
    assert llm.tokenizer.decode(own, False) == llm.tokenizer.decode(whole, False)
    for wrong in (5, ["a"], [-1]):
        with pytest.raises(helm.InvalidError):
            prompt(wrong)


def test_the_space_that_an_answer_begins_with_is_its_own() -> None:
    """Where words carry the space before them, and the template writes that, too."""
    template = (
        "<s>{% for m in messages %}{% if m.role == 'user' %}x {{ m.content }} x{% else %}"
        " {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = helm.Tokenizer(small_tokenizers.sentencepiece(), {}, {"default": template})
    ids = [tokenizer.token_id(piece) for piece in ("▁a", "b", "</s>")]
    user = {"role": "user", "content": "ab"}
    talk = [user, {"role": "assistant", "content": "ab", "tokens": ids}, user]
    asked = tokenizer.encode("<s>x ab x", add_special_tokens=False)
    assert Template().tokens(tokenizer, talk[:1]) == asked
    assert Template().tokens(tokenizer, talk)[: len(asked) + 3] == asked + ids
    usual = [user, {"role": "assistant", "content": "ab"}, user]
    assert Template().tokens(tokenizer, usual)[: len(asked) + 3] != asked + ids


def test_a_template_that_shows_another_text_is_followed(llm: helm.LLM) -> None:
    """As templates do that leave out what a model thought before."""
    assert llm.tokenizer is not None
    source = llm.tokenizer.chat_templates["default"]
    trimming = source.replace("message['content']", "message['content'].split('</think>')[-1]")
    assert trimming != source
    tokenizer = helm.Tokenizer(llm.tokenizer.backend, llm.tokenizer.special_tokens,
                                  {"default": trimming})  # fmt: skip
    contents = ("Hello", "<think>Hm</think>Hi!", "Go on", "Once upon a time")
    talk = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": text,
         "tokens": tokenizer.encode(text, add_special_tokens=False)}
        for i, text in enumerate(contents)
    ]  # fmt: skip
    bare = [{"role": m["role"], "content": m["content"]} for m in talk]
    text = tokenizer.render_chat(bare)
    assert "Hm" not in text
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert Template().tokens(tokenizer, talk) == expected
