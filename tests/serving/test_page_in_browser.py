"""The page in a real browser, against a live server."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvfold.serving.lane import Lane
from kvfold.serving.stored import StoredPrefixes
from kvfold.store.prefix_store import PrefixStore

PATIENCE = 60_000  # milliseconds, for machines that have other things to do
STICKING_OUT = """
    [...document.querySelectorAll('.side *, #ask *, .top *')]
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)
"""


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """`visit(url)`: the page in a tab of its own; no request may leave its server."""
    asked: list[tuple[str, str]] = []
    wrong: list[str] = []
    contexts = []

    def open_page(url: str, **settings: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append((url, request.url)))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert asked
    assert [there for home, there in asked if not there.startswith(home + "/")] == []
    assert wrong == []


def settle(page: Any, question: str, max_tokens: int = 12) -> None:
    """Ask, and wait for both answers to end."""
    start(page, question, max_tokens)
    page.locator("#send").wait_for(state="visible")


def start(page: Any, question: str, max_tokens: int) -> None:
    page.locator(".side").first.wait_for()
    page.evaluate(f"document.getElementById('max-tokens').value = {max_tokens}")
    page.fill("#question", question)
    page.keyboard.press("Enter")


def side(page: Any, kind: str) -> Any:
    return page.locator(".side", has=page.locator(f"h2:text-is('{kind}')"))


def meter(of: Any) -> tuple[int, int]:
    """Bytes that the bar shows, and those that would fill it."""
    bar = of.get_by_role("meter")
    return int(bar.get_attribute("aria-valuenow")), int(bar.get_attribute("aria-valuemax"))


def widths(of: Any) -> tuple[float, float]:
    """Of what the cache takes and of what the plain one needs, as shares of the bar."""
    shares = "bar => ['.takes', '.need'].map(n => bar.querySelector(n).style.width)"
    takes, need = of.locator(".bar").evaluate(shares)
    return float(takes.rstrip("%")) / 100, float(need.rstrip("%")) / 100


@pytest.fixture
def pair(serve: Any, lane: Any) -> Any:
    """A server of a folded and a plain model."""
    return serve({"plain": lane("plain"), "latent": lane("latent")})


def test_a_chat_moves_both_meters(pair: Any, visit: Any, tmp_path: Path) -> None:
    page = visit(pair.url)
    folded, plain = side(page, "Folded"), side(page, "Plain")
    settle(page, "Tell me of the sea. " * 8)
    before = meter(folded), meter(plain)
    settle(page, "And of the land? " * 4)
    shot = tmp_path / "page.png"
    page.screenshot(path=shot)
    assert shot.stat().st_size > 10_000
    for now, then in zip((meter(folded), meter(plain)), before, strict=True):
        assert now[0] > then[0] > 0
        assert now[1] == meter(plain)[1]
    for one in (folded, plain):
        assert widths(one)[0] == pytest.approx(meter(one)[0] / meter(one)[1], abs=0.01)
    assert widths(folded)[0] < widths(folded)[1]
    assert widths(plain)[0] == widths(plain)[1]
    assert max(widths(folded)[1], widths(plain)[1]) == 1
    assert re.fullmatch(r"\d+\.\d+× smaller", folded.locator(".times").inner_text())
    assert not plain.locator(".times").is_visible()
    for one in (folded, plain):
        assert one.locator(".message.question").count() == 2
        assert all(one.locator(".message.answer p").first.inner_text() for _ in range(2))
        assert int(one.locator(".tokens").inner_text()) > 240
        assert re.search(r"\d", one.locator(".first").inner_text())
        assert float(one.locator(".speed").inner_text()) > 0
        assert one.locator(".cached").inner_text() == "none"
    assert "smaller than the plain one" in page.locator("#announcer").inner_text()


def test_both_sides_are_asked_alike_and_keep_their_own_answers(pair: Any, visit: Any) -> None:
    bodies: list[Any] = []
    page = visit(pair.url)
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.method == "POST" else None)
    settle(page, "one")
    settle(page, "two")
    assert sorted(body["model"] for body in bodies[:2]) == ["latent", "plain"]
    first, second = bodies[:2]
    assert {**first, "model": ""} == {**second, "model": ""}
    assert first["seed"] == second["seed"]
    for body in bodies[2:]:
        own = side(page, "Plain" if body["model"] == "plain" else "Folded")
        said = own.locator(".message.answer p").first.evaluate("p => p.textContent")
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
        assert body["messages"][1]["content"] == said


def test_stopping_ends_the_answers_and_frees_the_rows(
    pair: Any, visit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Lane.step

    def slow(lane: Lane) -> int:  # else a busy machine's browser shows the answers at their end
        time.sleep(0.02)
        return quick(lane)

    monkeypatch.setattr(Lane, "step", slow)
    page = visit(pair.url)
    start(page, "Go on for ever", 450)
    side(page, "Plain").locator(".message.answer:not(.waiting)").wait_for()
    page.keyboard.press("Escape")
    page.locator("#send").wait_for(state="visible")
    assert page.locator(".note:text-is('Stopped.')").count() == 2
    page.wait_for_timeout(1000)
    assert all(state.rows == 0 for state in pair.engine.state().lanes.values())
    settle(page, "Still there?", 3)
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0


def test_one_model_fills_the_page_alone(serve: Any, lane: Any, visit: Any) -> None:
    page = visit(serve({"ced": lane("ced")}).url)
    settle(page, "Hello")
    assert page.locator(".side").count() == 1
    assert meter(side(page, "Folded"))[0] > 0


def test_sides_can_be_asked_in_turn(pair: Any, visit: Any) -> None:
    page = visit(pair.url)
    page.locator(".side").first.wait_for()
    page.get_by_text("Settings").click()
    page.get_by_label("One after the other").check()
    start(page, "Hello", 100)
    assert page.locator(".message.question").count() == 1
    page.locator("#send").wait_for(state="visible")
    assert page.locator(".message.question").count() == 2


def test_a_key_is_asked_for_and_sent(serve: Any, lane: Any, visit: Any) -> None:
    page = visit(serve({"ced": lane("ced")}, keys=("secret",)).url)
    page.get_by_text("this server needs an API key").wait_for()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use it").click()
    page.get_by_text("none came, or another one").wait_for()
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use it").click()
    settle(page, "Hello")
    assert page.locator(".error").count() == 0
    page.reload()
    page.locator(".side").first.wait_for()
    assert "secret" not in page.content()


def test_refusals_are_shown_in_the_servers_own_words(pair: Any, visit: Any) -> None:
    page = visit(pair.url)
    settle(page, "Too long", 9999)
    told = side(page, "Plain").get_by_role("alert").inner_text()
    assert told == "400: this server gives answers of at most 4096 tokens; got max_tokens=9999"
    assert page.locator("#question").input_value() == "Too long"
    settle(page, "Short", 3)
    assert page.locator(".error").count() == 2


def test_a_server_that_is_gone_is_told(serve: Any, lane: Any, visit: Any) -> None:
    server = serve({"ced": lane("ced")})
    page = visit(server.url)
    page.locator(".side").first.wait_for()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    settle(page, "Hello")
    assert "can't be reached" in page.get_by_role("alert").inner_text()


def test_markup_in_questions_and_answers_stays_text(
    serve: Any, visit: Any, scripted_lanes: dict[str, Any]
) -> None:
    page = visit(serve({"markup": scripted_lanes["markup"]}).url)
    settle(page, "<b>bold</b><script>document.title=8</script>", 20)
    answer = page.locator(".message.answer p").first
    assert answer.evaluate("p => p.textContent").startswith("<img src=x onerror=")
    assert page.locator(".talk img, .talk b, .talk script").count() == 0
    assert page.title() == "kvfold"


def test_nothing_sticks_out_of_the_window(pair: Any, visit: Any, tmp_path: Path) -> None:
    """Whatever its width, with everything unfolded and a question without a space."""
    page = visit(pair.url)
    settle(page, "w" * 300, 5)
    page.get_by_text("Settings").click()
    page.get_by_text("What these bytes are").first.click()
    for width, scheme in product((320, 390, 760, 800, 1280), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(STICKING_OUT) == []
        page.screenshot(path=tmp_path / f"{width}-{scheme}.png")


def test_everything_has_a_name_and_can_be_reached_by_keyboard(pair: Any, visit: Any) -> None:
    page = visit(pair.url)
    page.locator(".side").first.wait_for()
    for role, count in (("textbox", 1), ("combobox", 2), ("log", 2), ("meter", 2), ("region", 2)):
        named = page.get_by_role(role, name=re.compile(r"\w"))
        assert named.count() == page.get_by_role(role).count() == count
    page.focus("#anew")
    reached = []
    for _ in range(7):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("(e => e.id || e.className)(document.activeElement)"))
    # Nameless are the choices of a model, and the summary of the settings.
    assert reached == ["", "talk", "", "talk", "question", "send", ""]


def test_prompts_from_a_store_show_as_hits(
    serve: Any, lane: Any, visit: Any, tmp_path: Path
) -> None:
    made = lane("ced")
    made.store = StoredPrefixes(PrefixStore(tmp_path, block=8), made.attachment, block=16)
    page = visit(serve({"ced": made}).url)
    settle(page, "z" * 60, 3)
    made.store.close()
    page.get_by_role("button", name="New chat").click()
    settle(page, "z" * 60, 3)
    assert page.locator(".cached").inner_text() == "48 tokens"


@pytest.fixture
def demo_url(smollm2: Any) -> Iterator[str]:
    """`kvfold serve --demo`, as a user would run it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvfold", "serve", "--demo", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    found, read = None, list[str]()
    for line in process.stderr:
        read.append(line)
        if found := re.search(r"page to try it: (http://\S+)/", line):
            break
    assert found, "".join(read)
    # What it logs must be read, or it would wait for someone to do so.
    reader = threading.Thread(target=process.stderr.read)
    reader.start()
    yield found[1]
    process.terminate()
    process.wait(60)
    reader.join()
    process.stderr.close()


@pytest.mark.slow
def test_the_demo_takes_fewer_bytes_and_speaks(visit: Any, demo_url: str, tmp_path: Path) -> None:
    """SmolLM2 beside itself under its shipped add-on."""
    page = visit(demo_url)
    settle(page, "What is a cache, and why does a language model need one?", 40)
    page.screenshot(path=tmp_path / "demo.png")
    assert meter(side(page, "Folded"))[0] < 0.7 * meter(side(page, "Plain"))[0]
    for kind in ("Folded", "Plain"):
        assert "cache" in side(page, kind).locator(".message.answer p").first.inner_text()
