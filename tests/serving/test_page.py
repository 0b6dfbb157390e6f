"""The page, driven by a real browser: Debian's Chromium, headless."""

import asyncio
import json
import shutil
import socket
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

from medusa_jax.serving.http.app import PAGE_HEADERS, whole_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="needs Debian's packages chromium and chromium-driver",
    ),
]
# Without a screen, as root, and without calling home.
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FLAGS += ["--disable-dev-shm-usage", "--window-size=1200,900"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, port):
    browser.get(port.url)
    browser.execute_script("sessionStorage.clear(); turns = []")
    browser.get(port.url)
    return Page(browser)


class Page:
    """What a visitor does and sees."""

    def __init__(self, browser):
        self.browser = browser

    def one(self, selector):
        return self.browser.find_element("css selector", selector)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def set(self, name, value):
        self.browser.execute_script(f"document.getElementById('{name}').value = '{value}'")

    def until(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 60, 0.02).until(lambda _: condition())

    def ask(self, question, limit=50):
        self.set("limit", limit)
        self.one("#question").send_keys(question + "\n")

    def answers(self, state):
        return self.all(f".answer[data-state={state}]")

    def text(self, answer):
        return answer.find_element("css selector", ".text").get_attribute("textContent")


def test_the_same_text_with_and_without_drafts(page):
    page.until(lambda: "medusa" in page.one("#about").text)
    page.ask("in the hat", 60)
    page.until(lambda: page.answers("done"))
    [drafted] = page.answers("done")
    assert len(page.all(".answer .d1")) > 3 and page.all(".answer .d2")
    assert "60 tokens" in drafted.text and "accepted length" in drafted.text
    page.one("#plain").click()
    page.until(lambda: len(page.answers("done")) == 2)
    plain = page.answers("done")[1]
    assert page.text(plain) == page.text(drafted) != ""
    assert not plain.find_elements("css selector", ".d")
    page.until(lambda: "the same text" in plain.text)


def test_coloured_tokens_stream_and_stop(page, port):
    """Slowly enough to be watched."""
    with port.slowed(0.3):
        page.ask("the cat", 70)
        page.until(lambda: page.all(".answer .d1"))
        assert page.one(".answer").get_attribute("aria-busy") == "true"
        early = page.text(page.one(".answer"))
        page.until(lambda: len(page.text(page.one(".answer"))) > len(early))
        page.one("#stop").click()
        page.until(lambda: page.answers("stopped"))
        port.wait_idle()  # its slot is free
    assert "(stopped)" in page.one(".numbers").text
    assert page.one("#send").is_enabled() and not page.one("#stop").is_enabled()


HOSTILE = "<img src=x onerror=\"document.title = 'owned'\"> <script>document.title = 'owned'</script>"
MARKDOWN = f"""# A title

Some **bold** text, `code`, *slanted* and 2 * 3 * 4; {HOSTILE}

- one
- two
1. first

```python
def parse(text):
    return "# no title, **not bold**"
```

> said

| a | b |
after the table
"""


class Canned:
    """A port whose every answer is `MARKDOWN`, in pieces that cut its marks."""

    def __init__(self):
        self.calls = []
        routes = [
            Route("/", lambda request: HTMLResponse(whole_page(), headers=PAGE_HEADERS)),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*listener.getsockname())
        config = uvicorn.Config(Starlette(routes=routes), log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()

    def stop(self):
        self.server.should_exit = True
        self.thread.join()

    async def models(self, request):
        about = {"drafter": "medusa", "tree_nodes": 5, "dtype": "float32", "chat": True}
        return JSONResponse({"data": [{"id": "canned", "medusa": about}]})

    async def chat(self, request):
        self.calls.append(await request.json())

        async def pieces():
            for at in range(0, len(MARKDOWN), 7):
                own = {"parts": [[MARKDOWN[at : at + 7], at % 3]], "tokens": 2}
                ended = at + 7 >= len(MARKDOWN)
                if ended:
                    own |= {"new_tokens": 9, "tokens_per_second": 1, "steps": 3}
                    own |= {"mean_accepted_length": 3}
                choice = {"medusa": own, "finish_reason": "stop" if ended else None}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                await asyncio.sleep(0)
            yield "data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")


@pytest.fixture
def canned():
    server = Canned()
    yield server
    server.stop()


@pytest.fixture
def canned_page(browser, canned):
    browser.get(canned.url)
    page = Page(browser)
    page.until(lambda: "canned" in page.one("#about").text)
    return page


def test_markdown_without_html(canned_page):
    page = canned_page
    page.ask("hello")
    page.until(lambda: page.answers("done"))
    [answer] = page.answers("done")

    def texts(selector):
        found = answer.find_elements("css selector", f".text {selector}")
        return [one.get_attribute("textContent") for one in found]

    assert texts("h3") == ["A title"] and texts("strong") == ["bold"]
    assert texts("em") == ["slanted"] and texts(":not(pre) > code") == ["code"]
    assert texts(".item") == ["•one", "•two", "1.first"] and texts(".quote") == ["said"]
    assert texts("pre.table") == ["| a | b |"] and texts("p")[-1] == "after the table"
    code = 'def parse(text):\n    return "# no title, **not bold**"\n'
    assert texts("pre code") == [code] and texts(".bar span") == ["python"]
    assert HOSTILE in texts("p")[0] and "2 * 3 * 4" in texts("p")[0]
    assert not texts("img") and not texts("script") and page.browser.title == "medusa_jax"
    assert (
        len(texts(".d1")) > 5 and len(texts(".d2")) > 5
    )  # drafts are coloured in here as well
    page.one("#markdown").click()
    assert page.text(answer) == MARKDOWN


def test_a_conversation_survives_a_reload(canned_page, canned):
    page = canned_page
    page.ask("first", 77)
    page.until(lambda: page.answers("done"))
    before = page.one("#log").get_attribute("innerHTML")
    page.one("#question").send_keys("half a quest")
    page.browser.refresh()
    page.until(lambda: "canned" in page.one("#about").text)
    assert page.one("#log").get_attribute("innerHTML") == before
    assert page.one("#question").get_attribute("value") == "half a quest"
    assert page.one("#limit").get_attribute("value") == "77"
    page.one("#question").send_keys("ion\n")
    page.until(lambda: len(page.answers("done")) == 2)
    said = [(m["role"], m["content"]) for m in canned.calls[-1]["messages"]]
    assert said == [("user", "first"), ("assistant", MARKDOWN), ("user", "half a question")]
    page.one("#clear").click()
    page.browser.refresh()
    page.until(lambda: page.all(".examples button"))
    assert not page.all(".turn")
