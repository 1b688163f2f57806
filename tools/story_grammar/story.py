"""Draws a cast and a plot and tells them as one story. Knows nothing of dialogue or tokens."""

import random
from dataclasses import dataclass, field, replace

from . import words
from .grammar import OPTIONAL, PARAGRAPH, Plot, expand, read_phrases, read_plots

PLOTS = read_plots()
PHRASES = read_phrases()
TRAIT_LINES: dict[str, list[str]] = {}
for _line in PHRASES.pop("traits"):
    _trait, _, _text = _line.partition(": ")
    TRAIT_LINES.setdefault(_trait, []).append(_text)

_RARE = 0.12  # share of characters and things from the longer lists


@dataclass(frozen=True)
class Character:
    kind: str
    name: str
    gender: str  # a key of words.PRONOUNS
    adjective: str
    trait: str

    @property
    def pronouns(self) -> dict[str, str]:
        return words.PRONOUNS[self.gender]


@dataclass(frozen=True)
class Wish:
    """What a story has to contain; an empty string leaves the choice to the grammar."""

    hero_kind: str = ""
    hero_name: str = ""
    hero_trait: str = ""
    friend_kind: str = ""
    thing: str = ""
    thing_adjective: str = ""


_NO_WISH = Wish()


@dataclass(frozen=True)
class Story:
    text: str
    plot: Plot
    hero: Character
    friend: Character
    thing: str
    place: str
    slots: dict[str, str] = field(repr=False)

    def line(self, template: str, rng: random.Random) -> str:
        """One more sentence about this story's cast."""
        return expand(template, self.slots, PHRASES, rng)


def draw_kind(rng: random.Random) -> tuple[str, str]:
    """A kind of character and its gender, which is empty where either fits."""
    if rng.random() < _RARE:
        pool = words.RARE_KINDS
    else:
        pool = rng.choices([words.CHILDREN, words.ANIMALS, words.WORKERS], weights=[4, 7, 4], k=1)[
            0
        ]
    return rng.choice(list(pool.items()))


def draw_character(
    rng: random.Random, wish_kind: str, wish_name: str, other: Character | None, traits: list[str]
) -> Character:
    """A character with one of `traits` that differs from `other`; empty wishes are drawn."""
    while True:
        kind, gender = (wish_kind, kind_gender(wish_kind)) if wish_kind else draw_kind(rng)
        if wish_name in words.GIRL_NAMES + words.BOY_NAMES:
            gender = "f" if wish_name in words.GIRL_NAMES else "m"
        if other and not gender and rng.random() < 0.85:
            gender = "m" if other.gender == "f" else "f"
        gender = gender or rng.choice("fm")
        names = words.GIRL_NAMES if gender == "f" else words.BOY_NAMES
        name = wish_name or rng.choice(names)
        same_kind = other and other.kind == kind and not wish_kind
        same_name = other and other.name == name
        if kind_gender(kind) in ("", gender) and not same_kind and not same_name:
            break
    trait = rng.choice(traits)
    ages = words.YOUNG if kind in words.CHILDREN else words.YOUNG + words.OLD * 2
    adjective = trait if len(traits) == 1 else rng.choice([trait, rng.choice(ages)])
    return Character(kind, name, gender, adjective, trait)


def kind_gender(kind: str) -> str:
    """The gender of a kind; empty where either fits, as for a kind the lists do not have."""
    return words.EVERY_KIND.get(kind, "")


def draw_thing(rng: random.Random, wished: str) -> tuple[str, str]:
    """A thing and an adjective that suits it."""
    pool = words.RARE_THINGS if rng.random() < _RARE else words.THINGS
    thing = wished or rng.choice(list(pool))
    return thing, rng.choice(words.EVERY_THING.get(thing, words.UNKNOWN_THING))


def suits(plot: Plot, thing: str, trait: str) -> bool:
    """Whether the plot makes sense with this thing, which it may break, and a hero like this."""
    breakable = "things" not in plot.header or thing in words.HARD_THINGS
    return breakable and trait not in plot.header.get("without", [])


def cast_slots(hero: Character, friend: Character, rng: random.Random) -> dict[str, str]:
    """Slots for both characters: names, introductions, pronouns (the friend's with an f)."""
    called = rng.choice(["named", "named", "called"])
    hero_plain = words.article(f"{hero.adjective} {hero.kind}")
    slots = {
        "hero_name": hero.name,
        "friend_name": friend.name,
        "hero_kind": hero.kind,
        "friend_kind": friend.kind,
        "a_hero_plain": hero_plain,
        "the_hero_plain": f"the {hero.adjective} {hero.kind}",
        "a_hero": f"{hero_plain} {called} {hero.name}",
        "a_friend": words.article(f"{friend.adjective} {friend.kind} named {friend.name}"),
    }
    for role, character in (("hero", hero), ("friend", friend)):
        slots[f"{role}_intro"] = words.article(f"{character.kind} named {character.name}")
        slots[f"a_{role}_kind"] = words.article(character.kind)
    slots |= hero.pronouns
    slots |= {f"f{key}": value for key, value in friend.pronouns.items()}
    return slots


def scene_slots(
    hero: Character, thing: str, adjective: str, place: str, rng: random.Random
) -> dict[str, str]:
    """Slots for the thing, the place, the home and the weather."""
    weather = rng.choice(list(words.WEATHER))
    homes = words.HOMES if hero.kind in words.ANIMALS else words.CHILD_HOMES
    return {
        "thing": thing,
        "adj_thing": f"{adjective} {thing}",
        "a_thing": words.article(f"{adjective} {thing}"),
        "place": place,
        "in_place": f"{words.PLACES[place]} {place}",
        "to_place": f"to {place}",
        "home": rng.choice(homes),
        "weather": rng.choice(words.WEATHER[weather]),
        "day": f"one {weather} {rng.choice(words.HOURS)}",
        "trait": rng.choice(TRAIT_LINES[hero.trait]),
    }


def refer(character: Character, other: Character, rng: random.Random) -> str:
    """A way to name a character that cannot mean the other one: "Rusty" or "the fox"."""
    if character.kind != other.kind and rng.random() < 0.2:
        return f"the {character.kind}"
    return character.name


def tell_story(rng: random.Random, wish: Wish = _NO_WISH, plot: Plot | None = None) -> Story:
    """A story that grants `wish`, after `plot` or a random one."""
    thing, adjective = draw_thing(rng, wish.thing)
    while plot and not suits(plot, thing, wish.hero_trait):
        thing, adjective = draw_thing(rng, "")
    plot = plot or rng.choice([plot for plot in PLOTS if suits(plot, thing, wish.hero_trait)])
    traits = [trait for trait in words.TRAITS if trait not in plot.header.get("without", [])]
    if wish.hero_trait:
        traits = [wish.hero_trait]
    hero = draw_character(rng, wish.hero_kind, wish.hero_name, None, traits)
    friendly = [trait for trait in words.TRAITS if trait != "lonely"]
    friend = draw_character(rng, wish.friend_kind, "", hero, friendly)
    adjective = wish.thing_adjective or adjective
    place = rng.choice(list(words.PLACES))
    slots = cast_slots(hero, friend, rng) | scene_slots(hero, thing, adjective, place, rng)
    slots |= {key: rng.choice(values) for key, values in plot.header.items() if key not in slots}

    paragraphs: list[list[str]] = [[]]
    introduced = False  # a friend is named before being called "the mouse"
    for beat in plot.beats:
        if beat == [PARAGRAPH]:
            paragraphs.append([])
            continue
        if beat[0] == OPTIONAL:
            if rng.random() < 0.6:
                continue
            beat = beat[1:]
        template = rng.choice(beat)
        slots["hero"] = refer(hero, friend, rng) if len(paragraphs) > 1 else hero.name
        slots["friend"] = refer(friend, hero, rng) if introduced else friend.name
        paragraphs[-1].append(expand(template, slots, PHRASES, rng))
        introduced = introduced or friend.name in paragraphs[-1][-1]
    text = "\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)
    slots |= {"hero": hero.name, "friend": friend.name}
    return Story(text, plot, hero, friend, thing, place, slots)


def tell_tale(rng: random.Random, wish: Wish = _NO_WISH, start: str = "tale_start") -> Story:
    """A few sentences that name their two characters and their thing again and again."""
    story = tell_story(rng, wish)
    middle = rng.sample(PHRASES["tale"], rng.randint(2, 5))
    lines = [rng.choice(PHRASES[start]), *middle, rng.choice(PHRASES["tale_end"])]
    return replace(story, text=" ".join(story.line(line, rng) for line in lines))
