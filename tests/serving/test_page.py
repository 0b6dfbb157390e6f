"""The page, driven by a real browser: Debian's Chromium, headless."""

import shutil

import pytest

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
    # A page keeps its settings when it is left; the next test begins without them.
    browser.execute_script("removeEventListener('pagehide', keep); sessionStorage.clear()")
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

    def source(self, turn):
        """The text of a turn's answer before it is shown as Markdown."""
        return self.browser.execute_script(f"return textOf(turns[{turn}].answers[0])")

    def text(self, answer):
        return answer.find_element("css selector", ".text").get_attribute("textContent")


def test_it_shows_that_the_first_program_is_compiled(page, port, monkeypatch):
    compiling = [True]
    monkeypatch.setattr(type(port.server), "ready", property(lambda _: not compiling[0]))
    page.browser.get(port.url)
    page.until(lambda: "compiling, the first answer waits" in page.one("#about").text)
    compiling[0] = False
    page.until(lambda: page.one("#about").text.endswith("nodes"))


def test_the_same_text_with_and_without_drafts(page):
    page.until(lambda: "medusa" in page.one("#about").text)
    page.ask("in the hat", 60)
    page.until(lambda: len(page.answers("done")) == 2)
    drafted, plain = page.answers("done")
    assert len(page.all(".answer .d1")) > 3 and page.all(".answer .d2")
    assert "60 tokens" in drafted.text and "accepted length" in drafted.text
    assert page.text(plain) == page.text(drafted) != ""
    assert not plain.find_elements("css selector", ".d")
    page.until(lambda: page.one(".badge:not([hidden])").text == "the same text")
    assert "x as fast" in drafted.text
    assert all("Cut at the limit" in answer.text for answer in (drafted, plain))
    assert not any("\u0020" in d.text[:1] for d in page.all(".answer .d"))


def test_the_header_names_the_heads_and_the_weights_there_are(page, http):
    [card] = http.get("/v1/models").json()["data"]
    depth, about = card["medusa"]["depth"], page.one("#about")
    page.until(lambda: card["medusa"]["weights"] in about.text)
    heads = [d.text for d in page.all("#legend .d:not(.copied)")]
    assert heads == [str(d) for d in range(1, depth + 1)]
    assert bool(page.all("#legend .copied")) == card["medusa"]["copies"]
    try:  # a phone: nothing is cut off
        metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for one in (about, page.one("#legend")):
            assert one.value_of_css_property("overflow") == "visible"
            assert one.rect["x"] + one.rect["width"] <= 390
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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


def test_a_conversation_survives_a_reload(page, http):
    page.one("#plain").click()
    for name, value in (("system", "a cat"), ("top_p", 0.9), ("top_k", 20)):
        page.set(name, value)
    page.ask("in the hat", 7)
    page.until(lambda: page.answers("done"))
    before = page.one("#log").get_attribute("innerHTML")
    said = page.source(0)
    page.one("#question").send_keys("half a quest")
    page.browser.refresh()
    page.until(lambda: "medusa" in page.one("#about").text)
    assert page.one("#log").get_attribute("innerHTML") == before
    assert page.one("#question").get_attribute("value") == "half a quest"
    assert page.one("#limit").get_attribute("value") == "7"
    page.one("#question").send_keys("ion\n")
    page.until(lambda: len(page.answers("done")) == 2)
    assert not page.one("#plain").is_selected()
    turns = [
        ("system", "a cat"),
        ("user", "in the hat"),
        ("assistant", said),
        ("user", "half a question"),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    asked = {"messages": messages, "temperature": 0.7, "seed": 1, "max_tokens": 7}
    asked |= {"top_p": 0.9, "top_k": 20}
    answer = http.post("/v1/chat/completions", json=asked).json()
    assert page.source(1) == answer["choices"][0]["message"]["content"]
    page.one("#clear").click()
    page.browser.refresh()
    page.until(lambda: page.all(".examples button"))
    assert not page.all(".turn")


def test_the_number_of_a_long_item_stays_in_one_line(page):
    lines = page.browser.execute_script(
        "const text = '12. ' + 'word '.repeat(300), card = make('div', 'text');"
        "card.append(blockElement({runs: [[text, 0]]}, text, blocksOf(text, true)[0]));"
        "document.getElementById('log').append(card);"
        "const number = document.createRange();"
        "number.selectNodeContents(card.querySelector('.item > span'));"
        "return number.getClientRects().length"
    )
    assert lines == 1
