"""Talks between a user and the storyteller. Knows nothing of how a turn is written as tokens."""

import random

from . import words
from .grammar import FOLDER, capitalise, read_lines
from .story import PLOTS, Story, Wish, draw_kind, draw_thing, kind_gender, tell_story, tell_tale

Turn = dict[str, str]  # {"role": "user" | "assistant", "content": text}

SMALL_TALK = [line.split(" = ") for line in read_lines(FOLDER / "talk" / "small_talk.txt")]
QUESTIONS = [line.split(" = ") for line in read_lines(FOLDER / "talk" / "questions.txt")]
REQUESTS = read_lines(FOLDER / "talk" / "requests.txt")
TALE_REQUESTS = read_lines(FOLDER / "talk" / "tale_requests.txt")
UNKNOWN = read_lines(FOLDER / "talk" / "unknown.txt")
REFUSALS = read_lines(FOLDER / "talk" / "refusals.txt")
NO_STORY = "I have not told you a story yet. Shall I tell you one about {a_kind} and {a_thing}?"

_INVENTED = 0.04  # share of the user's words that no list has


def user(text: str, rng: random.Random) -> Turn:
    """A user's turn, sometimes typed carelessly."""
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.15:
        text = text.rstrip(".!?")
    return {"role": "user", "content": text}


def assistant(text: str) -> Turn:
    return {"role": "assistant", "content": text}


def random_word(rng: random.Random) -> str:
    """A word the grammar does not know."""
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))
    return letters if rng.random() < 0.7 else capitalise(letters)


def offer(template: str, rng: random.Random) -> str:
    """Fills a reply that proposes a story."""
    kind, thing = draw_kind(rng)[0], draw_thing(rng, "")[0]
    return template.format(a_kind=words.article(kind), a_thing=words.article(thing))


def small_talk(rng: random.Random) -> list[Turn]:
    """A question that is not about a story, with its answer."""
    roll = rng.random()
    if roll < 0.55:
        asked, answers = rng.choice(SMALL_TALK)
        return [
            user(rng.choice(asked.split(" | ")), rng),
            assistant(offer(rng.choice(answers.split(" | ")), rng)),
        ]
    if roll < 0.7:
        asked = rng.choice(QUESTIONS)[0].split(" | ")[0]
        if "{" not in asked:
            return [user(asked, rng), assistant(offer(NO_STORY, rng))]
    asked = rng.choice(UNKNOWN)
    while "{word}" in asked:
        asked = asked.replace("{word}", random_word(rng), 1)
    return [user(asked, rng), assistant(offer(rng.choice(REFUSALS), rng))]


def invented_word(rng: random.Random) -> str:
    """A word that can be said but does not exist, so that the model learns to repeat new words."""
    syllables = [
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))
    ]
    return "".join(syllables) + rng.choice(["", "n", "r", "t", "x", "ck", "ll", "mp"])


def wished_kind(rng: random.Random) -> str:
    return invented_word(rng) if rng.random() < _INVENTED else draw_kind(rng)[0]


def wished_thing(rng: random.Random) -> tuple[str, dict[str, str]]:
    """A thing as the user would name it, and the wish for it."""
    if rng.random() < _INVENTED:
        thing = invented_word(rng)
        return words.article(thing), {"thing": thing}
    thing, adjective = draw_thing(rng, "")
    if rng.random() < 0.3:
        return words.article(f"{adjective} {thing}"), {"thing": thing, "thing_adjective": adjective}
    return words.article(thing), {"thing": thing}


def wished_hero(rng: random.Random) -> tuple[str, dict[str, str]]:
    """A hero as the user would name it, and the wish for it."""
    kind = wished_kind(rng)
    wish = {"hero_kind": kind}
    text = words.article(kind)
    if rng.random() < 0.2:
        wish["hero_trait"] = rng.choice(words.TRAITS)
        text = words.article(f"{wish['hero_trait']} {kind}")
    if rng.random() < 0.2:
        names = {"f": words.GIRL_NAMES, "m": words.BOY_NAMES}
        name = rng.choice(names[kind_gender(kind) or rng.choice("fm")])
        wish["hero_name"] = capitalise(invented_word(rng)) if rng.random() < _INVENTED else name
        text += f" named {wish['hero_name']}"
    return text, wish


def draw_wish(rng: random.Random) -> tuple[str, Wish]:
    """A topic as the user would put it, and what it asks of the story."""
    roll = rng.random()
    if roll < 0.15:
        text, wish = wished_thing(rng)
        return text, Wish(**wish)
    text, wish = wished_hero(rng)
    if roll < 0.5:
        thing_text, thing_wish = wished_thing(rng)
        return f"{text} and {thing_text}", Wish(**wish, **thing_wish)
    if roll < 0.75:
        friend = wished_kind(rng)
        if friend != wish["hero_kind"]:
            return f"{text} and {words.article(friend)}", Wish(**wish, friend_kind=friend)
    return text, Wish(**wish)


def request_story(rng: random.Random) -> tuple[list[Turn], Story]:
    """The user asks for a story, and the storyteller tells one that fits."""
    if rng.random() < 0.15:
        plot = rng.choice(PLOTS)
        story, topic = tell_story(rng, plot=plot), rng.choice(plot.header["about"])
    else:
        topic, wish = draw_wish(rng)
        story = tell_story(rng, wish)
    if rng.random() < 0.12:
        asked = rng.choice(
            ["Tell me a story.", "Tell me another story.", "I want to hear a story."]
        )
    else:
        asked = rng.choice(REQUESTS).format(topic=topic)
    return [user(asked, rng), assistant(story.text)], story


def ask_about(story: Story, rng: random.Random) -> list[Turn]:
    """A question on the story just told, with its answer."""
    while True:
        asked, answers = rng.choice(QUESTIONS)
        if "{in_place}" in answers and story.place not in story.text:
            continue
        if "{home}" in answers and story.slots["home"].lower() not in story.text.lower():
            continue
        if answers.strip("{}") in story.plot.header and story.text.count("\n") == 0:
            continue  # a tale has no plot
        if "_kind}" in asked and story.hero.kind == story.friend.kind:
            continue
        question = story.line(rng.choice(asked.split(" | ")), rng)
        return [user(question, rng), assistant(story.line(rng.choice(answers.split(" | ")), rng))]


def tale_talk(rng: random.Random) -> list[Turn]:
    """A tale that was asked for and several questions on it."""
    topic, wish = draw_wish(rng)
    tale = tell_tale(rng, wish, start="tale_talk_start")
    turns = [user(rng.choice(TALE_REQUESTS).format(topic=topic), rng), assistant(tale.text)]
    for _ in range(rng.randint(2, 6)):
        turns += ask_about(tale, rng)
    return turns


def talk(rng: random.Random) -> list[Turn]:
    """A dialogue of one to a dozen turns."""
    turns: list[Turn] = []
    if rng.random() < 0.4:
        turns += small_talk(rng)
    if turns and rng.random() < 0.35:
        return turns + (small_talk(rng) if rng.random() < 0.5 else [])
    for _ in range(1 if rng.random() < 0.8 else 2):
        told, story = request_story(rng)
        turns += told
        for _ in range(rng.randint(0, 5)):
            turns += ask_about(story, rng)
    if rng.random() < 0.3:
        turns += small_talk(rng)
    return turns
