"""Documents of the training text, as strings with the special tokens written out."""

import random
from collections.abc import Iterator

from .dialogue import Turn, tale_talk, talk
from .story import tell_story, tell_tale

BEGIN, END = "<|begin|>", "<|end|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BEGIN, END, USER, ASSISTANT]

# Renders what `render_talk` renders; other roles, such as system, are left out.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ['user', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TALKS = 0.5  # share of documents that are dialogues


def render_talk(turns: list[Turn]) -> str:
    return BEGIN + "".join(f"<|{turn['role']}|>{turn['content']}{END}" for turn in turns)


def documents(seed: int) -> Iterator[str]:
    """Documents without end; the same seed gives the same text."""
    rng = random.Random(seed)
    while True:
        if rng.random() < _TALKS:
            yield render_talk(talk(rng))
        else:
            yield BEGIN + tell_story(rng).text + END


def tales(seed: int) -> Iterator[str]:
    """Short dense documents, from which a model learns early to repeat the names it has read."""
    rng = random.Random(seed)
    while True:
        yield BEGIN + tell_tale(rng).text + END


def tale_talks(seed: int) -> Iterator[str]:
    """Short dense dialogues, from which it learns to grant wishes and to answer questions."""
    rng = random.Random(seed)
    while True:
        yield render_talk(tale_talk(rng))
