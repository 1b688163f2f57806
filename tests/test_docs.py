"""The documents: short sentences, files and links that exist, words that have one meaning."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
MOST_WORDS = 25
MEAN_WORDS = 16
README_LINES = 120

FOLDERS = ("bench", "cmake", "cpp", "cuda", "docs", "examples", "python", "tests", "tools")
DOCUMENTS = sorted(
    [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *(file for folder in ("bench", "docs") for file in (ROOT / folder).rglob("*.md")),
    ]
)
SOURCES = (".py", ".pyi", ".cc", ".h", ".cu", ".cuh", ".cmake", ".md", ".sh")

# Files of users, of other programs, or that a command writes: they need not be in the repository.
FOREIGN = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat-history.json", "plan.json", "out.json", "FILE.json", "model.safetensors",
    "special_tokens_map.json", "added_tokens.json", "version.h",
    "prctl.h", "cublas_api.h", "library_types.h", "doctest.h",
}  # fmt: skip

# Words that have another name now: a pattern, and what to write instead. docs/words.md has all.
GONE_FROM_CODE = {
    r"kernel tiers?\b": "isa",
    r"loading modes?\b": "format and access",
    r"\btransformer blocks?\b": "layer",
    r"\bweights (?:are |that are )?stream(?:ed|ing)?\b": "weights visit",
    r"\bstream(?:s|ed|ing)? (?:the )?weights?\b": "visit",
    r"\bblocks? streams?\b": "blocks that visit",
    r"\bsteps? (?:that )?streams?\b": "steps in which weights visit",
    r"\battention in pieces\b": "attention in parts",
    r"DESIGN\.md": "a page of docs/",
}
GONE_NAMES = {
    r"block_?streams?(?![a-z])": "visits",
    r"streamed_?units": "visiting_units",
    r"stream_(?:least|steps|from|choices|tokens|pages)": "visit_least, ...",
    r"is_?compressed": "a format",
}
GONE = {
    **GONE_FROM_CODE,
    **GONE_NAMES,
    r"\bstreamed units\b": "units that visit",
    r"\bcompressed weights\b": "bf16c",
}


@dataclass(frozen=True)
class Sentence:
    """Words of one sentence, with the line on which its paragraph begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        return sum(1 for word in self.text.split() if re.search(r"\w", word))


def plain(text: str) -> str:
    """Markdown without its marks: code is one word, a link is its text."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", lambda match: match[1].lstrip("./").capitalize(), text)
    text = re.sub(r"`[^`]+`", "code", text)
    return re.sub(r"\*\*|__|<[^>]+>", "", text)


def paragraphs(document: str) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs and items. Code, tables, headings and comments are left out."""
    document = re.sub(
        r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), document, flags=re.S
    )
    begin, lines, fence = 0, [], ""
    for number, line in enumerate([*document.splitlines(), ""], 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
            line = ""
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+(.*)", line)
        if fence or item or not line.strip() or re.match(r"\s*(?:\||#|</?\w)", line):
            if lines:
                yield begin, " ".join(lines)
            lines = []
        if item:
            begin, lines = number, [item[1]]
        elif not fence and line.strip() and not re.match(r"\s*(?:\||#|</?\w)", line):
            if not lines:
                begin = number
            lines.append(line.strip())


def sentences(document: str) -> Iterator[Sentence]:
    """A sentence ends at a full stop, a question mark or a colon at the end of its paragraph."""
    for line, text in paragraphs(document):
        for part in re.split(r"(?<=[.!?])[)\"”]?\s+(?=[\"“(A-Z\d`*\[]|code\b)", plain(text)):
            if part.strip():
                yield Sentence(line, part.strip())


def headings(document: str) -> set[str]:
    """Anchors as GitHub makes them."""
    found = re.findall(r"^#+\s+(.*)$", re.sub(r"```.*?```", "", document, flags=re.S), re.M)
    names = [re.sub(r"[^\w\- ]", "", plain(re.sub(r"`", "", name)).lower()) for name in found]
    return {name.strip().replace(" ", "-") for name in names}


@cache
def repository() -> frozenset[str]:
    """Paths of the files in the folders of the repository, with / between names."""
    found = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    found += [file for file in ROOT.iterdir() if file.is_file()] + list((ROOT / ".ci").iterdir())
    return frozenset(file.relative_to(ROOT).as_posix() for file in found)


@cache
def suffixes() -> frozenset[str]:
    """Every path, and what is left of it without its first folders."""
    return frozenset(
        "/".join(parts[i:])
        for parts in (path.split("/") for path in repository())
        for i in range(len(parts))
    )


def exists(name: str) -> bool:
    """Whether a file or a folder of the repository has this name; `*` stands for any text."""
    name = name.rstrip("/")
    if "*" in name:
        pattern = re.compile(r"(?:.*/)?" + re.escape(name).replace(r"\*", r"[^/]*"))
        return any(pattern.fullmatch(path) for path in repository())
    inside = (f"{name}/", f"/{name}/")
    return name in suffixes() or any(
        path.startswith(inside[0]) or inside[1] in path for path in repository()
    )


def unbraced(name: str) -> list[str]:
    """Braces list parts of names, as in a shell."""
    match = re.search(r"\{([^{}]*)\}", name)
    if not match:
        return [name]
    parts = [name[: match.start()] + part + name[match.end() :] for part in match[1].split(",")]
    return [inner for part in parts for inner in unbraced(part)]


def named_files(text: str) -> Iterator[str]:
    """Names in a text that look like files or folders of this repository."""
    for name in re.findall(r"(?<![\w./<>$\-])[\w.*{}/,\-]+(?![\w/>(])", text):
        name = name.rstrip(".,")
        begins = name.split("/")[0] in (*FOLDERS, ".ci") and "/" in name
        ends = name.endswith(SOURCES) and re.match(r"[\w{*]", name)
        if (begins or ends) and not re.fullmatch(r"\.\w+", name):
            yield from unbraced(name)


def dead_names(text: str) -> list[str]:
    """Names of files that are not there."""
    return sorted(
        {
            name
            for name in named_files(text)
            if name.split("/")[-1] not in FOREIGN and not exists(name)
        }
    )


def code_of(document: str) -> str:
    """What stands in backticks and in code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", document, re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", document, flags=re.M | re.S)
    return "\n".join([*blocks, *re.findall(r"`([^`]+)`", rest)])


def gone_words(text: str, gone: dict[str, str]) -> list[str]:
    """Each with what to write instead. Line ends and marks of comments count as spaces."""
    text = " ".join(re.sub(r"^\s*(?://|#)", " ", text, flags=re.M).split())
    return [
        f"{match[0]!r}: write {instead}"
        for pattern, instead in gone.items()
        for match in re.finditer(pattern, text, re.I)
    ]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


every_document = pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)


@every_document
def test_sentences_are_short(file: Path) -> None:
    found = list(sentences(file.read_text(encoding="utf-8")))
    long = [f"line {s.line}: {s.words} words: {s.text}" for s in found if s.words > MOST_WORDS]
    assert long == []
    mean = sum(s.words for s in found) / max(1, len(found))
    assert mean <= MEAN_WORDS, f"{mean:.1f} words on average"
    assert [s.text for s in found if s.text.startswith("Of ")] == []


@every_document
def test_files_that_are_named_exist(file: Path) -> None:
    assert dead_names(code_of(file.read_text(encoding="utf-8"))) == []


@every_document
def test_links_lead_somewhere(file: Path) -> None:
    document = file.read_text(encoding="utf-8")
    dead = []
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`]+`", "", document, flags=re.S)
    ):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = file if not path else (file.parent / path).resolve()
        if not linked.exists() or (
            anchor and anchor not in headings(linked.read_text(encoding="utf-8"))
        ):
            dead.append(target)
    assert dead == []


# words.md says what they were.
@pytest.mark.parametrize("file", [d for d in DOCUMENTS if d.name != "words.md"], ids=name_of)
def test_words_that_have_gone_are_not_used(file: Path) -> None:
    assert gone_words(file.read_text(encoding="utf-8"), GONE) == []


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES


def test_every_page_of_docs_is_linked_from_its_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / t).resolve() for t in re.findall(r"\]\(([^)#\s]+)", index)}
    pages = {file for file in (ROOT / "docs").rglob("*.md") if file.name != "README.md"}
    assert [name_of(file) for file in sorted(pages - linked)] == []


def comments(file: Path) -> str:
    """Comments and docstrings of a source file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return "\n".join(re.findall(r'"""(?:.|\n)*?"""|#[^\n]*', text))
    return "\n".join(re.findall(r"//[^\n]*|/\*(?:.|\n)*?\*/", text))


def code_files() -> list[str]:
    """Names of the source files, but for this one, which shows what it looks for."""
    own = name_of(Path(__file__).resolve())
    endings = tuple(end for end in SOURCES if end not in (".md", ".cmake", ".sh"))
    return [path for path in sorted(repository()) if path.endswith(endings) and path != own]


def test_comments_name_files_that_exist() -> None:
    dead = {path: dead_names(comments(ROOT / path)) for path in code_files()}
    assert {path: names for path, names in dead.items() if names} == {}


def test_comments_do_not_use_words_that_have_gone() -> None:
    used = {path: gone_words(comments(ROOT / path), GONE_FROM_CODE) for path in code_files()}
    assert {path: words for path, words in used.items() if words} == {}


def test_code_does_not_use_names_that_have_gone() -> None:
    texts = {path: path + (ROOT / path).read_text(encoding="utf-8") for path in code_files()}
    used = {path: gone_words(text, GONE_NAMES) for path, text in texts.items()}
    assert {path: words for path, words in used.items() if words} == {}


def test_constants_of_the_kernels_are_those_of_the_code() -> None:
    document = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(k\w+)` \| ([\d, ]+) \| ([\d, ]+) \|", document, re.M)
    assert len(rows) >= 12
    checked = set()
    for name, *documented in rows:
        for isa, value in zip(("avx512", "avx2"), documented, strict=True):
            for header in (f"vec_{isa}.h", f"quant/ints_{isa}.h"):
                text = (ROOT / "cpp/cpu/kernels" / header).read_text(encoding="utf-8")
                for found in re.findall(rf" {name}(?:\[\d+\])? = \{{?(?:0, )?([\d, ]+)\}}?;", text):
                    assert value == found, f"{name} of {header}"
                    checked.add((name, isa))
    assert checked == {(name, isa) for name, *_ in rows for isa in ("avx512", "avx2")}


def test_pictures_are_what_their_program_draws() -> None:
    folder = ROOT / "docs" / "pictures"
    program = runpy.run_path(str(folder / "make.py"))
    for name, draw in (("two-devices", "two_devices"), ("memory-stack", "memory_stack")):
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") == program[draw]()


# The checks of the checks: each finds what it is there for.


def test_a_long_sentence_is_found() -> None:
    text = "# A title\n\nShort one. Word" + " word" * 25 + " end. Short again.\n\n| a | b |\n"
    assert [s.words for s in sentences(text)] == [2, 27, 2]
    assert [s.text for s in sentences("It ends (in brackets.) Then `x.py` ends. So [a.b](c).")] == [
        "It ends (in brackets.", "Then code ends.", "So A.b.",
    ]  # fmt: skip


def test_a_dead_name_is_found() -> None:
    assert dead_names("see cpp/none/at_all.cc, README.md and `compiler/nothing.py`") == [
        "compiler/nothing.py", "cpp/none/at_all.cc",
    ]  # fmt: skip
    assert dead_names("cmake/isa.{cmake,gone} and bench/*.py, config.json") == ["cmake/isa.gone"]
    assert headings("# A `b`, c\n\n## Two words\n") == {"a-b-c", "two-words"}


def test_a_word_that_has_gone_is_found() -> None:
    assert gone_words("// It streams\n// the weights.", GONE) == [
        "'streams the weights': write visit"
    ]
    assert gone_words("It streams text.", GONE) == []
    assert len(gone_words("BlockStream block_stream.h x.is_compressed()", GONE_NAMES)) == 3
    assert len(gone_words("steps.stream_choices() visit_tokens", GONE_NAMES)) == 1
