"""Measures how often the bundled model ends its stories, grants wishes and answers rightly.

python tools/evaluate_bundled_model.py [FOLDER]
"""

import argparse
import random
import re
from itertools import islice
from pathlib import Path

import torch
from story_grammar import dialogue
from story_grammar.corpus import documents, render_talk
from story_grammar.story import Story, tell_story
from story_grammar.words import BOY_NAMES, GIRL_NAMES
from transformers import AutoTokenizer, LlamaForCausalLM

BUNDLED = Path(__file__).resolve().parent.parent / "python" / "helm" / "bundled"
SEED = 1000  # a seed that training does not use
LONGEST = 280  # new tokens
NAME = re.compile(rf"\b(?:{'|'.join(GIRL_NAMES + BOY_NAMES)})\b")


class Teller:
    """The model with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.end = self.tokenizer.eos_token_id

    def tell(self, prompt: str, heat: float = 0.0) -> tuple[str, int, bool]:
        """The new text, its length in tokens and whether it ended by itself."""
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        options = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {}
        options |= {"max_new_tokens": LONGEST, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        new = self.model.generate(ids, attention_mask=mask, **options)[0, ids.shape[1] :].tolist()
        ended = new[-1] == self.end
        return self.tokenizer.decode(new, skip_special_tokens=True), len(new), ended

    def reply(self, turns: list[dialogue.Turn]) -> str:
        return self.tell(render_talk(turns) + "<|assistant|>")[0]


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def sampled_stories(teller: Teller, count: int) -> None:
    known = {word for text in islice(documents(SEED), 5000) for word in words_of(text)}
    ended, lengths, strange, total, strays, mentions = 0, [], 0, 0, 0, 0
    for _ in range(count):
        text, tokens, stopped = teller.tell("<|begin|>Once upon a time", heat=0.8)
        ended += stopped
        lengths.append(tokens)
        strange += sum(word not in known for word in words_of(text))
        total += len(words_of(text))
        names = NAME.findall(text)
        cast = list(dict.fromkeys(names))[:2]  # a story has two characters
        mentions += len(names)
        strays += sum(name not in cast for name in names)
    middle = sorted(lengths)[count // 2]
    print(f"sampled stories: {ended}/{count} ended by themselves, median {middle} tokens")
    print(f"names of neither character: {strays}/{mentions}")
    print(f"words outside the grammar: {strange}/{total}")


def granted_wishes(teller: Teller, count: int) -> None:
    rng = random.Random(SEED)
    asked, granted = 0, 0
    for _ in range(count):
        topic, wish = dialogue.draw_wish(rng)
        story = teller.reply([{"role": "user", "content": f"Tell me a story about {topic}."}])
        wanted = [wish.hero_kind, wish.hero_name, wish.friend_kind, wish.thing]
        asked += sum(bool(word) for word in wanted)
        granted += sum(bool(word) and word in story for word in wanted)
    print(f"wishes granted: {granted}/{asked}")


def questions(story: Story, rng: random.Random) -> dict[str, tuple[str, str]]:
    """Topic -> question and the words its answer must have."""
    hero, friend = story.hero, story.friend
    return {
        "hero": ("Who was the story about?", f"{hero.kind} named {hero.name}"),
        "both": ("Who was in the story?", f"{hero.name} and {story.slots['friend_intro']}"),
        "kind": (f"Who was {friend.name}?", friend.kind),
        "home": (f"Where did {hero.name} live?", story.slots["home"]),
        "thing": ("Which thing was in the story?", story.thing),
        "problem": ("What was the problem?", story.line(story.plot.header["problem"][0], rng)),
    }


def right_answers(teller: Teller, count: int) -> None:
    rng = random.Random(SEED)
    right: dict[str, int] = {}
    for _ in range(count):
        story = tell_story(rng)
        told = [
            {"role": "user", "content": "Tell me a story."},
            {"role": "assistant", "content": story.text},
        ]
        for topic, (question, wanted) in questions(story, rng).items():
            answer = teller.reply([*told, {"role": "user", "content": question}])
            right[topic] = right.get(topic, 0) + (wanted in answer)
    for topic, hits in right.items():
        print(f"right answers, {topic}: {hits}/{count}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=BUNDLED)
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teller = Teller(args.folder)
    sampled_stories(teller, args.count)
    granted_wishes(teller, args.count)
    right_answers(teller, args.count)


if __name__ == "__main__":
    main()
