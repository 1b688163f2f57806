"""Word lists of the story grammar. Knows nothing of plots, sentences or dialogue."""

GIRL_NAMES = "Mia Lily Anna Rosa Nora Ella Ruby Clara Daisy Molly Ivy Alice".split()
BOY_NAMES = "Tom Sam Ben Max Leo Jack Oscar Finn Hugo Pip Rusty Otto".split()

# kind -> gender: "f", "m", or "" where either fits.
CHILDREN = {"girl": "f", "boy": "m"}
ANIMALS = dict.fromkeys(
    "fox mouse bear rabbit owl cat dog duck frog hedgehog squirrel goat horse wolf turtle pig lion "
    "crow".split(),
    "",
)
WORKERS = dict.fromkeys(
    "sailor baker farmer miller painter gardener shepherd tailor teacher knight singer".split(), ""
) | {"king": "m", "queen": "f", "fisherman": "m"}
RARE_KINDS = dict.fromkeys(
    "dragon robot wizard penguin elephant monkey tiger parrot camel donkey pirate giant elf badger "
    "otter beaver deer snail spider bee butterfly kangaroo zebra giraffe crocodile dinosaur "
    "unicorn ghost astronaut captain nurse pilot cook hunter carpenter lizard seal swan goose "
    "raven mole ant cricket panda octopus clockmaker magician dancer writer doctor "
    "inventor".split(),
    "",
) | {"princess": "f", "prince": "m", "witch": "f", "fairy": "f", "snowman": "m", "postman": "m"}

EVERY_KIND = CHILDREN | ANIMALS | WORKERS | RARE_KINDS

# Adjectives of a character; each has lines in phrases/traits.txt.
TRAITS = "curious kind brave shy clever cheerful quiet busy gentle lonely".split()
YOUNG = "little small young".split()
OLD = ["old"]

_COLOURS = "red blue green yellow".split()
_HARD = _COLOURS + "golden silver old shiny tiny wooden".split()
_SOFT = _COLOURS + "warm soft striped old".split()
_PAPER = _COLOURS + "old little pretty".split()
_SHINY = "golden silver old shiny tiny".split()

# thing -> adjectives that suit it.
THINGS = (
    dict.fromkeys("lamp bell drum box ball cup flute clock whistle bucket cart".split(), _HARD)
    | dict.fromkeys("hat scarf blanket bag coat basket umbrella".split(), _SOFT)
    | dict.fromkeys("kite book map letter".split(), _PAPER)
    | dict.fromkeys("key ring coin mirror shell spoon lantern".split(), _SHINY)
)
RARE_THINGS = (
    dict.fromkeys(
        "telescope trumpet crown sword pencil bottle ladder teapot wagon guitar camera radio jar "
        "wheel rocket pearl mask sled shovel hammer violin compass necklace button candle".split(),
        _HARD,
    )
    | dict.fromkeys("pillow balloon ribbon sock boot cushion glove tent doll".split(), _SOFT)
    | dict.fromkeys("notebook puzzle flag fan picture poem diary".split(), _PAPER)
)
EVERY_THING = THINGS | RARE_THINGS
# Things that can break.
HARD_THINGS = {
    thing
    for thing, adjectives in EVERY_THING.items()
    if adjectives is _HARD or adjectives is _SHINY
} - {"key", "coin", "ring"}

UNKNOWN_THING = _COLOURS + ["old", "little"]  # adjectives for a thing the lists do not have

# place -> preposition for being there.
PLACES = {
    "the forest": "in",
    "the river": "by",
    "the market": "at",
    "the meadow": "in",
    "the beach": "on",
    "the old mill": "near",
    "the garden": "in",
    "the hill": "on",
    "the lake": "by",
    "the bridge": "near",
    "the farm": "at",
    "the harbor": "at",
    "the barn": "near",
    "the park": "in",
    "the castle": "near",
    "the orchard": "in",
}

HOMES = [
    "in a small house near the river",
    "in a little house at the edge of the forest",
    "in a quiet village",
    "in a village by the sea",
    "in a tiny cottage on a green hill",
    "in a little town between two hills",
    "in an old house with a blue door",
    "near a deep forest",
    "under a big oak tree",
    "on a small farm",
]
CHILD_HOMES = [home for home in HOMES if not home.startswith("under")]

# Weather of the day -> sentences that agree with it.
WEATHER = {
    "sunny": ["The sun was shining.", "The sky was blue and clear.", "Birds were singing."],
    "warm": ["The air smelled of flowers.", "Bees hummed in the grass.", "The sky was blue."],
    "windy": [
        "The wind blew through the trees.",
        "Leaves danced in the air.",
        "Clouds ran across the sky.",
    ],
    "cold": [
        "The grass was white with frost.",
        "The air was cold and clear.",
        "A thin snow lay on the ground.",
    ],
    "gray": [
        "The sky was full of clouds.",
        "A soft mist lay over the fields.",
        "It smelled of rain.",
    ],
}
HOURS = ["morning", "day", "afternoon"]

PRONOUNS = {
    "f": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "m": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}


def article(phrase: str) -> str:
    """The phrase with its indefinite article: "old lamp" -> "an old lamp"."""
    vowel = phrase[0] in "aeiou" and not phrase.startswith("uni")
    return f"{'an' if vowel else 'a'} {phrase}"
