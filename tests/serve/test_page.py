"""The chat page in a browser, against a scripted server."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is not installed (the extra serve)")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra serve)")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from starlette.responses import JSONResponse  # noqa: E402

from scripted_server import Scripted, end, running, text  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = os.environ.get("HELM_TEST_PICTURES")  # a folder for what the page looks like
expect = playwright.expect
expect.set_options(timeout=20_000)  # other programs may take the machine's time
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH"),
]
HOSTILE = (
    "<script>window.broken = 1</script>\n\n<img src=x onerror='window.broken = 2'>\n\n"
    "[a](javascript:window.broken=3) [b](https://example.org/?a=1&b=<i>) **<b onclick=x>**\n\n"
    "```html\n<iframe src='https://example.org'></iframe>\n```\n\n| <svg onload=x> |\n|---|\n| y |"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as runner:
        options = ["--no-sandbox", "--disable-background-networking"]
        browser = runner.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with running() as scripted:
        yield scripted


def open_page(browser: Any, server: Scripted, **options: Any) -> Iterator[Any]:
    """The page in a fresh profile; afterwards, nothing was refused by the policy, no script
    failed, and nothing was asked of others."""
    context = browser.new_context(**options)
    context.set_default_timeout(20_000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"failed: {error}"))
    page.on("console", lambda m: wrong.append(m.text) if "Content Security" in m.text else None)
    page.on("request", lambda r: None if r.url.startswith((server.url, "data:", "blob:"))
            else wrong.append(f"asked for {r.url}"))  # fmt: skip
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("scripted-1b")
    yield page
    context.close()
    assert wrong == []


@pytest.fixture
def page(browser: Any, server: Scripted) -> Iterator[Any]:
    yield from open_page(browser, server)


def say(page: Any, words: str) -> None:
    page.locator("#input").fill(words)
    page.locator("#send").click()


def picture(page: Any, name: str) -> None:
    if PICTURES:
        page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))


def answers(page: Any) -> Any:
    return page.locator("article.assistant")


def test_an_answer_streams_with_its_figures(page: Any, server: Scripted) -> None:
    rest = threading.Event()
    server.script = [[text("Hel"), rest, text("lo **you**"), *end(tokens=12, rate=34.5)]]
    say(page, "Hi\nthere")
    expect(answers(page).locator(".body")).to_have_text("Hel")  # before the end has come
    expect(page.locator("#stop")).to_be_visible()
    rest.set()
    expect(answers(page).locator("strong")).to_have_text("you")
    expect(answers(page).locator(".figures")).to_contain_text("12 tokens · 34.5 tokens/s · first")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#status")).to_have_text("Hello **you**")
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Hi\nthere"}]
    assert body["model"] == "scripted-1b"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert not {"temperature", "top_p", "max_tokens", "seed"} & set(body)
    server.script = [[text("Again"), *end("length")]]
    say(page, "More")
    expect(answers(page).nth(1).locator(".figures")).to_contain_text("cut at the limit")
    assert [m["role"] for m in server.bodies[1]["messages"]] == ["user", "assistant", "user"]


def test_stop_and_retry(page: Any, server: Scripted) -> None:
    server.script = [[text("One two"), 30.0, *end()], [text("Three"), *end()]]
    say(page, "Count")
    expect(answers(page).locator(".body")).to_have_text("One two")
    page.locator("#stop").click()
    expect(answers(page).locator(".figures")).to_contain_text("stopped")
    expect(page.locator("#input")).to_be_focused()
    for _ in range(200):
        page.wait_for_timeout(50 if not server.left else 0)
    assert server.left == 1
    page.get_by_role("button", name="Retry").click()
    expect(answers(page).locator(".body")).to_have_text("Three")
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "Count"}]


def test_reload_keeps_the_conversations(page: Any, server: Scripted) -> None:
    server.script = [[text("Hello"), *end()], [text("Kept so far"), 30.0]]
    say(page, "First question")
    expect(answers(page).locator(".figures")).to_contain_text("tokens")
    page.get_by_role("button", name="New conversation").first.click()
    expect(page.get_by_role("heading", name="What shall we work on?")).to_be_visible()
    say(page, "Second question")
    expect(answers(page).locator(".body")).to_have_text("Kept so far")
    page.reload()  # while the answer comes
    expect(answers(page).locator(".body")).to_have_text("Kept so far")
    expect(answers(page).locator(".figures")).to_contain_text("broke off")
    page.locator("#conversations").get_by_role("button", name="First question").click()
    expect(answers(page).locator(".body")).to_have_text("Hello")
    expect(answers(page).locator(".figures")).to_contain_text("34.5 tokens/s")


def test_conversations_are_deleted_restored_and_exported(page: Any, server: Scripted) -> None:
    server.script = [[text("Hello"), *end()]]
    say(page, "A question: why?")
    expect(page.locator("#send")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation").click()
    assert download.value.suggested_filename == "A-question-why.json"
    exported = json.loads(Path(download.value.path()).read_text())
    assert [m["content"] for m in exported["messages"]] == ["A question: why?", "Hello"]
    page.get_by_role("button", name="Delete this conversation").click()
    expect(page.locator("#conversations li")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(answers(page).locator(".body")).to_have_text("Hello")
    page.get_by_role("button", name="Delete this conversation").click()
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).length") == 0


def test_hostile_text_stays_text(page: Any, server: Scripted) -> None:
    pieces = [text(HOSTILE[i : i + 7]) for i in range(0, len(HOSTILE), 7)]
    server.script = [[text(reasoning="<img src=x onerror='window.broken = 4'>"), *pieces, *end()]]
    say(page, "<img src=x onerror='window.broken = 5'>")
    expect(page.locator("#send")).to_be_visible()
    body = answers(page).locator(".body")
    shown = body.inner_text()
    for words in ("<script>window.broken = 1</script>", "javascript:window.broken=3", "<b onclick",
                  "<iframe src='https://example.org'></iframe>", "<svg onload=x>"):  # fmt: skip
        assert words in shown
    inside = page.locator("#messages")
    assert inside.locator("script, img, iframe, b, [onclick], [onload], [onerror]").count() == 0
    links = body.locator("a")
    assert links.evaluate_all("all => all.map((a) => a.protocol)") == ["https:"]
    assert links.get_attribute("rel") == "noopener noreferrer nofollow"
    assert page.evaluate("window.broken") is None
    page.reload()
    expect(body).to_contain_text("<script>")
    assert page.evaluate("window.broken") is None


def test_markdown(page: Any, server: Scripted) -> None:
    answer = (
        "# Plan\n\nUse `a_b*c*` and *this*.\n\n1. one\n   - inner\n2. two\n\n> said\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nif a < b:\n    *p*\n```\n\n"
        "2 * 3 * 4 at https://example.org/a."
    )
    server.script = [[text(answer), *end()]]
    say(page, "Show")
    body = answers(page).locator(".body")
    expect(body.locator("h3")).to_have_text("Plan")
    expect(body.locator("p > code")).to_have_text("a_b*c*")
    expect(body.locator("em")).to_have_text("this")
    expect(body.locator("ol > li")).to_have_count(2)
    expect(body.locator("ol > li ul li")).to_have_text("inner")
    expect(body.locator("td").nth(1)).to_have_text("2")
    assert body.locator("pre").inner_text() == "if a < b:\n    *p*"
    expect(body.locator("p").last).to_have_text("2 * 3 * 4 at https://example.org/a.")
    expect(body.locator("a")).to_have_attribute("href", "https://example.org/a")


def test_a_thought_is_folded(page: Any, server: Scripted) -> None:
    rest = threading.Event()
    server.script = [[text(reasoning="I wonder"), rest, 0.1, text("So"), *end()]]
    say(page, "Think")
    summary = answers(page).locator("summary")
    expect(summary).to_have_text("Thinking …")
    rest.set()
    expect(summary).to_have_text(re.compile(r"Thought for \d+\.\d s"))
    thought = answers(page).locator("details div")
    expect(thought).to_be_hidden()
    summary.click()
    expect(thought).to_have_text("I wonder")


def test_settings_reach_the_server(page: Any, server: Scripted) -> None:
    server.script = [[text("Aye"), *end()], [text("Yes"), *end()]]
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be a sailor.")
    for label, value in (("Temperature", "0.5"), ("Top p", "0.9"), ("Max tokens", "50")):
        page.get_by_label(label).fill(value)
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Thinking first").select_option("off")
    page.get_by_label("API key").fill("secret-key")
    page.get_by_label("Temperature").fill("9")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#settings")).to_be_visible()  # 9 is too hot
    page.get_by_label("Temperature").fill("0.5")
    picture(page, "settings")
    page.get_by_role("button", name="Save").click()
    say(page, "Hi")
    expect(answers(page).locator(".body")).to_have_text("Aye")
    body = server.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be a sailor."}
    sampling = ("temperature", "top_p", "max_tokens", "seed")
    assert [body[name] for name in sampling] == [0.5, 0.9, 50, 7]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.keys == ["Bearer secret-key"]
    assert "secret-key" not in page.evaluate("JSON.stringify({...localStorage})")
    page.reload()
    say(page, "Again")
    expect(answers(page).nth(1).locator(".body")).to_have_text("Yes")
    assert server.bodies[1]["seed"] == 7
    assert server.keys[1] == "Bearer secret-key"


def test_errors_stand_where_the_answer_would(page: Any, server: Scripted) -> None:
    said = {"error": {"message": "9,000 tokens, the context holds 4,096", "code": "x"}}
    server.script = [
        lambda: JSONResponse(said, 400),
        lambda: JSONResponse({"error": {"message": "Busy."}}, 429, {"retry-after": "7"}),
        [text("Part"), {"error": {"message": "The device is lost."}}],
        [text("Part")],
        lambda: JSONResponse(["no error"], 500),
        [": wait\n\n", 0.1, text("At last"), *end()],
    ]
    say(page, "Hi")
    error = answers(page).locator(".error")
    for words in ("9,000 tokens, the context holds 4,096", "Busy. Try again in 7 s.",
                  "The device is lost.", "The answer broke off", "status 500"):  # fmt: skip
        expect(error).to_contain_text(words)
        picture(page, "error")
        page.get_by_role("button", name="Retry").click()
    expect(answers(page).locator(".body")).to_have_text("At last")
    expect(error).to_have_count(0)
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["Hi"]


def test_a_server_that_wants_a_key_gets_it(page: Any, server: Scripted) -> None:
    server.locked = True
    page.reload()
    expect(page.locator("#notice")).to_contain_text("No key. The key belongs into the settings.")
    page.locator("#notice").get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill("k")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#model")).to_have_text("scripted-1b")
    expect(page.locator("#notice")).to_be_hidden()


def test_text_made_to_take_time_does_not(page: Any, server: Scripted) -> None:
    lines = [
        "**a " * 20_000, "`a``b```" * 9_000, "[" * 50_000, "```" + "a" * 50_000 + "`",
        "# " + " #" * 30_000 + "x", "|\n" + " " * 50_000 + "x", "-" + " " * 50_000 + "x",
    ]  # fmt: skip
    nested = "\n".join(" " * i + "- x" for i in range(1500))
    server.script = [[text("\n\n".join([*lines, nested, "the end"])), *end()]]
    started = time.monotonic()
    say(page, "Hi")
    expect(answers(page).locator(".figures")).to_contain_text("tokens", timeout=30_000)
    expect(answers(page).locator(".body p").last).to_have_text("the end")
    assert time.monotonic() - started < 20  # a second on a machine that does nothing else


def test_by_the_keyboard_alone(page: Any, server: Scripted) -> None:
    server.script = [[text("One"), 30.0], [text("Two"), *end()]]
    expect(page.locator("#input")).to_be_focused()
    press, active = page.keyboard.press, "document.activeElement.id"
    page.keyboard.type("line one")
    press("Shift+Enter")
    page.keyboard.type("line two")
    press("Enter")
    expect(answers(page).locator(".body")).to_have_text("One")
    press("Escape")
    expect(answers(page).locator(".figures")).to_contain_text("stopped")
    assert server.bodies[0]["messages"][0]["content"] == "line one\nline two"
    press("Shift+Tab")
    assert page.evaluate("document.activeElement.title") == "Retry"
    press("Enter")
    expect(answers(page).locator(".body")).to_have_text("Two")
    assert page.evaluate(active) == "input"
    page.locator("#new").focus()
    press("Shift+Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    press("Enter")
    assert page.evaluate(active) == "input"
    order = []
    page.locator("#new").focus()
    for _ in range(6):
        press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
    assert order == ["line one line two", "export", "delete", "open-settings", "log", ""]
    page.locator("#open-settings").focus()
    press("Enter")
    assert page.evaluate("document.activeElement.closest('dialog').id") == "settings"
    press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    assert page.evaluate(active) == "open-settings"


def test_every_control_has_a_name(page: Any, server: Scripted) -> None:
    server.script = [[text("```py\n1\n```"), *end()]]
    say(page, "Hi")
    expect(page.locator("#send")).to_be_visible()
    page.locator("#open-settings").click()
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input, textarea, select, section, nav, dialog')]
        .filter((e) => !(e.ariaLabel || e.innerText?.trim() || e.labels?.length
            || e.getAttribute('aria-labelledby')))
        .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("#status").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen(browser: Any, server: Scripted, scheme: str) -> None:
    options = {"viewport": {"width": 360, "height": 640}, "color_scheme": scheme}
    opened = open_page(browser, server, **options)
    page = next(opened)
    wide = (
        "`" + "x" * 90 + "` and\n\n```\n" + "y" * 90 + "\n```\n\n| " + "z" * 80 + " |\n|---|\n| 1 |"
    )
    server.script = [[text(wide), *end()]]
    say(page, "w" * 120)
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.querySelector('#log').scrollWidth") == 360
    picture(page, f"narrow-{scheme}")
    sidebar = page.locator("#sidebar")
    expect(sidebar).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    expect(sidebar).to_be_visible()
    page.wait_for_timeout(250)
    picture(page, f"narrow-list-{scheme}")
    page.keyboard.press("Escape")
    expect(sidebar).to_be_hidden()
    next(opened, None)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_wide_screen(browser: Any, server: Scripted, scheme: str) -> None:
    options = {"viewport": {"width": 1280, "height": 800}, "color_scheme": scheme}
    opened = open_page(browser, server, **options)
    page = next(opened)
    picture(page, f"empty-{scheme}")
    answer = (
        "Attention over **far** pages costs `bytes / rate`:\n\n```python\ndef seconds(bytes, rate):"
        "\n    return bytes / rate\n```\n\n- prompts are computed in chunks\n- decoding reads all"
        "\n\n| device | tokens/s |\n|---|---:|\n| CPU | 33.0 |\n| GPU | 81.2 |"
    )
    server.script = [[text(reasoning="A question of rates."), text(answer), *end()]] * 2
    for question in ("How long does attention take?", "And with two devices?"):
        say(page, question)
        expect(page.locator("#send")).to_be_visible()
    expect(answers(page)).to_have_count(2)
    log = page.locator("#log")  # what is new is in sight
    assert log.evaluate("(e) => e.scrollHeight - e.scrollTop - e.clientHeight") < 2
    picture(page, f"wide-{scheme}")
    next(opened, None)
