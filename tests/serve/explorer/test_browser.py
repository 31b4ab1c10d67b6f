"""Pages in a real Chromium: what runs, what fits, who can read it, and click paths.

The explorer's, and at the end those of a policy server.

`make browser` runs these. Without Chromium they are deselected, and the report's header says so;
with CI they fail. With PICTURES=FOLDER it also saves a picture of each page, to be looked at.
"""

import base64
import json
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np
import pytest
import uvicorn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.serve.app import create_app
from replaylake.serve.explorer.app import create_explorer
from replaylake.serve.explorer.episodes.frames import encode_png
from replaylake.serve.explorer.visits import profiles
from replaylake.serve.explorer.visits.request_queue import RequestQueue
from replaylake.serve.safety.tokens import Tokens

pytestmark = pytest.mark.browser
_AXE = Path(__file__).with_name("axe.min.js")
_PAGES = {
    "lake": "/",
    "dataset": "/datasets/walks",
    "hostile": "/datasets/hostile",
    "one": "/datasets/one",
    "diff": "/datasets/walks/diff?a=1&b=2",
    "episodes": "/datasets/walks/episodes?sort=return&order=descending",
    "episode": "/datasets/walks/episode?id=w/09",
    "hostile episodes": "/datasets/hostile/episodes",
    "frames": "/datasets/images/episode?id=i/0",
    "tokens": "/datasets/chats/episode?id=tree%230&agent=solver",
    "hostile tokens": "/datasets/chats/episode?id=HOSTILE%230&shade=mismatch",
    "groups": "/datasets/chats/groups",
    "group": "/datasets/chats/group?id=sum&high=0.75",
    "hostile group": "/datasets/chats/group?id=HOSTILE",
    "comparison": "/datasets/walks/compare?ids=w/02,w/09,w/11",
    "hostile comparison": "/datasets/hostile/compare?id=HOSTILE",
    "no comparison": "/datasets/walks/compare",
    "outliers": "/datasets/walks/episodes?sort=repetition&order=descending",
    "breakdown": "/datasets/walks/breakdown?by=policy&sort=steps",
    "hostile breakdown": "/datasets/hostile/breakdown?by=remark",
    "console": "/sql",
    "result": "/sql?q=SELECT+*+FROM+hostile.steps",
    "runs": "/runs",
    "run": "/runs/01run",
    "policies": "/policies",
    "unknown": "/nowhere",
}
# Pages of a lake that servers have logged to.
_SERVED_PAGES = {
    "policy": "/policies/clone",
    "trial": "/policies/clone?try=1&observation=[0.5,1]&temperature=2",
    "refused trial": "/policies/clone?try=1&observation=[0.5,1",
    "serving": "/serving",
    "decision log": "/serving/live",
    "hostile decision log": "/serving/fresh",
}
# What is too wide, what is too small, and what lies outside of the window.
_LAYOUT = """(() => {
  const found = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push('page wider than the window');
  for (const element of document.body.querySelectorAll('*')) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || element.closest('.scroll, .skip, pre, svg')) continue;
    const shown = `${element.tagName}.${element.className}: ${element.textContent.slice(0, 40)}`;
    if (box.right > width + 1) found.push(`beyond the right edge: ${shown}`);
  }
  for (const box of document.querySelectorAll('.plot, .panel, .chart, .say')) {
    if (box.scrollWidth > box.clientWidth + 1) found.push(`wider than its box: ${box.className}`);
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ['SCRIPT', 'STYLE'].includes(parent.tagName)) continue;
    const size = parseFloat(getComputedStyle(parent).fontSize);
    if (size < 12) found.push(`text of ${size} px: ${walker.currentNode.data.slice(0, 40)}`);
  }
  return found;
})()"""
_VIOLATIONS = """axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})
.then(found => found.violations.map(one => one.id + ': ' + one.nodes.slice(0, 3)
.map(node => node.html.slice(0, 160) + ' ' + (node.any[0]?.message ?? '')).join(' | ')))"""


@pytest.fixture(scope="module")
def address(explored_lake):
    """Serve the lake on a free port."""
    with MetricsLog(explored_lake.storage, "01run") as log:
        for update in range(20):
            log.add(update, {"loss": 1 / (1 + update)}, time.time())
    with _serve(explored_lake) as address:
        yield address


@pytest.fixture(scope="module")
def served_address(served_lake):
    with _serve(served_lake) as address:
        yield address


@contextmanager
def _serve(lake, **options):
    with _run(create_explorer(lake, **options)) as address:
        yield address


@contextmanager
def _run(app):
    config = uvicorn.Config(
        app,
        port=0,
        log_level="error",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def _open(browser, url):
    browser.open(url)
    # A dataset's page shows its profile once that is computed.
    browser.wait_until("!document.querySelector('[data-refresh]')", 60)
    browser.wait_for_frames()


@pytest.mark.parametrize("name", list(_SERVED_PAGES))
def test_a_page_of_what_was_served_fits(browser, served_address, name):
    _check_page(browser, served_address + _SERVED_PAGES[name], name)


def test_a_sweep_fits_and_its_lines_are_links(browser, sweep_lake):
    with _serve(sweep_lake) as address:
        _check_page(browser, address + "/runs/01sweep", "sweep")
        browser.show(1280, 900)
        # With the keyboard: the last line in the picture is the best trial.
        browser.run("[...document.querySelectorAll('.parallel a')].pop().focus(); 0")
        browser.press("Enter")
        browser.wait_until("location.pathname === '/runs/01trial'")


@pytest.mark.parametrize("name", list(_PAGES))
def test_a_page_fits_and_can_be_read_by_all(browser, address, hostile, name):
    _check_page(browser, address + _PAGES[name].replace("HOSTILE", quote(hostile)), name)


def _check_page(browser, url, name):
    for width, height in ((1280, 900), (390, 844)):
        for dark in (False, True):
            browser.show(width, height, dark=dark)
            _open(browser, url)
            where = (name, width, "dark" if dark else "light")
            if folder := os.environ.get("REPLAYLAKE_PICTURES"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                file = Path(folder, "-".join(map(str, where)).replace(" ", "_") + ".png")
                browser.save_picture(file, whole=True)
            assert browser.run(_LAYOUT) == [], where
            assert browser.run("document.title") != "owned"
            said = browser.take_messages()
            # A browser notes the status of a page that says what was not found.
            assert [one for one in said if "404" not in one and "422" not in one] == [], where
            if width == 1280 or not dark:
                # As a test's own: the pages' policy lets no script of others in.
                browser.run(_AXE.read_text())
                assert browser.run(_VIOLATIONS) == [], where


def _check_all(browser, where):
    """Check layout and accessibility in a wide and in a narrow window."""
    for width, height in ((1280, 900), (390, 844)):
        browser.show(width, height)
        # Plots are drawn anew in a frame after the change of the window.
        deadline = time.monotonic() + 60
        while (found := browser.run(_LAYOUT)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == [], (where, width)
        browser.run(_AXE.read_text())
        assert browser.run(_VIOLATIONS) == [], (where, width)
    browser.show(1280, 900)


def test_a_run_is_followed_while_it_trains(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("replaylake.serve.explorer.runs.runs_page._REFRESH_S", 0.2)
    lake = open_lake(tmp_path / "lake", create=True)
    record = {"run_id": "01run", "kind": "offline", "status": "running", "config": {"seed": 1}}
    lake.registry.record_run("01run", record)
    shown = "[...document.querySelectorAll('.panel td')].map(e => e.textContent).join(' ')"
    pause = "[data-refresh] button"
    with _serve(lake) as address, RunLease(lake.storage, "01run"):
        browser.open(address + "/runs")
        _check_all(browser, "runs")
        browser.open(address + "/runs/01run")
        browser.run("window.isSame = true; 0")
        _check_all(browser, "a run without metrics")
        with MetricsLog(lake.storage, "01run") as log:
            log.add(1, {"loss": 0.75, "return": 3.0}, time.time())
        browser.wait_until(f"{shown}.includes('0.75')")
        browser.wait_until("document.querySelectorAll('.plot').length === 2")
        _check_all(browser, "a run with metrics")
        # What has the focus, is open or chosen stays.
        browser.run(
            "document.querySelector('details').open = true;"
            "document.querySelector('.series input').click();"
            "document.querySelector('.series input').focus(); scrollTo(0, 120)"
        )
        scrolled = browser.run("scrollY")
        with MetricsLog(lake.storage, "01run") as log:
            log.add(2, {"loss": 0.625, "return": 4.0}, time.time())
        browser.wait_until(f"{shown}.includes('0.625')")
        assert browser.run("document.querySelector('details').open")
        assert browser.run("document.activeElement === document.querySelector('.series input')")
        assert not browser.run("document.activeElement.checked")
        assert browser.run("scrollY") == scrolled
        browser.click(pause)
        assert browser.run(f"document.querySelector('{pause}').textContent") == "Resume"
        with MetricsLog(lake.storage, "01run") as log:
            log.add(3, {"loss": 0.5, "return": 5.0}, time.time())
        time.sleep(1)
        assert "0.625" in browser.run(shown)
        lake.registry.record_run("01run", {**record, "status": "done"})
        browser.run(f"document.querySelector('{pause}').focus()")
        browser.press("Enter")
        browser.wait_until(f"{shown}.includes('0.5 ')")
        browser.wait_until("!document.querySelector('[data-refresh]')")
        assert browser.run("window.isSame")
        assert browser.take_messages() == []


def test_a_window_that_is_seen_has_a_stream_and_others_have_none(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("replaylake.serve.explorer.runs.runs_page._REFRESH_S", 0.2)
    lake = open_lake(tmp_path / "lake", create=True)
    lake.registry.record_run("01run", {"run_id": "01run", "kind": "offline", "status": "running"})
    shown = "[...document.querySelectorAll('.panel td')].map(e => e.textContent).join(' ')"
    say = "document.querySelector('[data-refresh] span').textContent"
    app = create_explorer(lake)

    def hide(is_hidden):
        browser.run(
            "Object.defineProperty(document, 'hidden', "
            f"{{value: {is_hidden}, configurable: true}});"
            "document.dispatchEvent(new Event('visibilitychange')); 0"
        )

    with _run(app) as address, RunLease(lake.storage, "01run"):
        browser.open(address + "/runs/01run")
        browser.wait_until(f"{say} === 'This page is updated when it changes'")
        assert app.live._num == 1
        # What is sent takes the place of what was read: nothing is asked for beside the stream.
        reads = "performance.getEntriesByType('resource').filter(e => e.initiatorType === 'fetch')"
        with MetricsLog(lake.storage, "01run") as log:
            log.add(1, {"loss": 0.75}, time.time())
        browser.wait_until(f"{shown}.includes('0.75')")
        assert browser.run(f"{reads}.length") == 0
        hide("true")
        _wait(lambda: app.live._num == 0)
        hide("false")
        _wait(lambda: app.live._num == 1)
        browser.click("[data-refresh] button")
        _wait(lambda: app.live._num == 0)
        browser.click("[data-refresh] button")
        _wait(lambda: app.live._num == 1)
        # Where as many are followed as may be, the page is read again instead.
        monkeypatch.setattr("replaylake.serve.explorer.visits.live_pages._MAX_STREAMS", 0)
        browser.open(address + "/runs/01run")
        with MetricsLog(lake.storage, "01run") as log:
            log.add(2, {"loss": 0.625}, time.time())
        browser.wait_until(f"{shown}.includes('0.625')")
        assert browser.run(f"{reads}.length") > 0
        _wait(lambda: app.live._num == 0)  # the page before had one
        assert all("503" in one for one in browser.take_messages())
        browser.open("about:blank")


def test_behind_a_proxy_that_holds_events_back_a_page_is_read(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("replaylake.serve.explorer.runs.runs_page._REFRESH_S", 0.2)
    lake = open_lake(tmp_path / "lake", create=True)
    lake.registry.record_run("01run", {"run_id": "01run", "kind": "offline", "status": "running"})
    explorer = create_explorer(lake)

    async def app(scope, receive, send):
        is_held = (b"accept", b"text/event-stream") in scope["headers"]

        async def forward(message):
            if not (is_held and message["type"] == "http.response.body"):
                await send(message)

        await explorer(scope, receive, forward)

    shown = "[...document.querySelectorAll('.panel td')].map(e => e.textContent).join(' ')"
    with _run(app) as address, RunLease(lake.storage, "01run"):
        browser.open(address + "/runs/01run")
        browser.run("Follower.patienceMs = 100; 0")
        for _ in range(2):
            browser.click("[data-refresh] button")
        with MetricsLog(lake.storage, "01run") as log:
            log.add(1, {"loss": 0.75}, time.time())
        browser.wait_until(f"{shown}.includes('0.75')")
        _wait(lambda: explorer.live._num == 0)
        browser.open("about:blank")


def _wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_profile_takes_the_place_of_its_progress(browser, explored_lake, monkeypatch):
    monkeypatch.setattr("replaylake.serve.explorer.datasets.dataset_page._REFRESH_S", 0.2)
    monkeypatch.setattr(profiles, "_WAIT_S", 0.0)
    compute, may_go = profiles.compute_profile, threading.Event()

    def wait(*arguments):
        assert may_go.wait(120)
        return compute(*arguments)

    monkeypatch.setattr(profiles, "compute_profile", wait)
    with _serve(explored_lake) as address:
        try:
            browser.open(address + "/datasets/walks")
            browser.run("window.isSame = true; 0")
            _check_all(browser, "a profile in progress")
            browser.run("document.querySelector('table').closest('[tabindex]').focus()")
        finally:
            may_go.set()
        browser.wait_until("document.querySelector('.chart a')")
        assert browser.run("window.isSame")
        browser.wait_until("!document.querySelector('[data-refresh]')")
        titles = "JSON.stringify([...document.querySelectorAll('h2')].map(e => e.textContent))"
        followed = browser.run(titles)
        assert "Returns" in followed or "Episodes" in followed
        browser.open(address + "/datasets/walks")
        assert browser.run(titles) == followed
        assert browser.take_messages() == []


def test_an_empty_lake_fits(browser, empty, address):
    # Rendered by the app, shown under the address of the other lake.
    browser.show(390, 844)
    html = empty.client.get("/").text
    browser.open(address + "/")
    browser.run(f"document.body.innerHTML = {html.partition('<body>')[2]!r}; 0")
    assert "no dataset yet" in browser.run("document.body.textContent")
    assert browser.run(_LAYOUT) == []


def test_a_bar_leads_to_the_worst_episodes_and_on(browser, address):
    browser.show(1280, 900)
    _open(browser, address + "/")
    browser.follow("a[href='/datasets/walks']")
    browser.wait_until("document.querySelector('.chart a')", 60)
    browser.follow(".chart a")
    assert browser.run("document.querySelectorAll('#episodes tbody tr').length") == 1
    browser.follow("#episodes tbody a")
    assert browser.run("document.querySelector('h1').textContent") == "w/00"
    browser.open(address + "/datasets/walks/episodes")
    browser.follow("#episodes thead th:nth-child(2) a")
    assert browser.run("document.querySelector('#episodes tbody td').textContent") == "w/11"
    browser.follow("#episodes thead th:nth-child(2) a")
    browser.follow("#episodes tbody a")
    browser.follow("a[rel=next]")
    assert browser.run("document.querySelector('h1').textContent") == "w/01"


def test_what_is_known_of_a_token_is_read_by_keys_and_by_touch(browser, address):
    said = "document.querySelector('#token-facts').textContent"
    browser.show(390, 844)
    _open(browser, address + "/datasets/chats/episode?id=tree%230&agent=solver")
    assert browser.run("document.querySelector('#token-facts').hidden")
    browser.run("document.querySelectorAll('.tokens')[1].focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    # "ask": log-probs are 0, -0.25 and -0.5.
    text = browser.run(said)
    assert text.startswith('"k": id 107, log-prob -0.5, probability 0.607')
    browser.press("Home")
    assert browser.run(said).startswith('"a": id 97')
    browser.click(".tokens .token:nth-child(2)")
    assert browser.run(said).startswith('"l": id 108')
    _check_all(browser, "a chosen token")
    assert browser.take_messages() == []


def test_many_discrete_values_are_dots_and_few_are_joined(browser, tmp_path, episode_maker):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("walks").append([episode_maker("w/long", 150), episode_maker("w/short", 20)])
    # Points of the curve's color halfway between action 0 and action 1.
    between = """(() => {
      const plot = [...document.querySelectorAll('.plot')].find(
        (one) => one.querySelector('h3').textContent === 'Action');
      const canvas = plot.querySelector('canvas');
      const rows = [Math.round(canvas.height * 0.35), Math.round(canvas.height * 0.1)];
      const pixels = canvas.getContext('2d').getImageData(0, rows[0], canvas.width, rows[1]).data;
      let num = 0;
      for (let i = 0; i < pixels.length; i += 4)
        if (pixels[i] === 63 && pixels[i + 1] === 143 && pixels[i + 2] === 189) num += 1;
      return num;
    })()"""
    browser.show(1280, 900)
    with _serve(lake) as address:
        for name, is_joined in (("w/short", True), ("w/long", False)):
            _open(browser, f"{address}/datasets/walks/episode?id={name}")
            browser.wait_until("document.querySelectorAll('.plot canvas').length >= 4")
            browser.wait_for_frames()
            assert (browser.run(between) > 0) == is_joined, name
        assert browser.take_messages() == []


def test_a_bar_of_a_group_selects_its_samples(browser, address):
    browser.show(1280, 900)
    _open(browser, address + "/datasets/chats/groups")
    browser.follow("a[href$='id=sum']")
    browser.run("document.querySelector('.chart a').focus()")
    browser.press("Enter")
    browser.wait_until("location.search.includes('low=0')")
    browser.wait_until("document.querySelectorAll('.sample').length === 1")
    browser.follow(".sample a")
    assert browser.run("document.querySelector('h1').textContent") == "sum#0"


def test_episodes_are_selected_and_compared_by_the_keyboard(browser, address):
    browser.show(1280, 900)
    _open(browser, address + "/datasets/walks/episodes?sort=steps&order=descending")
    button = "document.querySelector('button[form=compare]')"
    assert browser.run(f"{button}.disabled")
    for number in (0, 2):
        browser.run(f"document.querySelectorAll('#compare [type=checkbox]')[{number}].focus()")
        browser.press(" ")
    assert browser.run("document.querySelector('#selected').textContent") == "2 selected"
    browser.run(f"{button}.focus()")
    browser.press("Enter")
    browser.wait_until("location.pathname.endsWith('/compare') && window.uPlot")
    browser.wait_until("document.querySelectorAll('.plot canvas').length === 6")
    assert browser.run("location.search") == "?id=w%2F11&id=w%2F09"
    browser.run("document.querySelector('#scrub').focus()")
    browser.press("ArrowRight")
    values = "[...document.querySelectorAll('.series .value')].map(e => e.textContent)"
    browser.wait_until(f"{values}[0] === '1'")
    # Reward and return so far of step 1, of both episodes.
    assert browser.run(values)[:4] == ["1", "1", "1", "1"]
    names = browser.run("[...document.querySelectorAll('.series label')].map(e => e.innerText)")
    assert [name.split()[0] for name in names[:2]] == ["w/11", "w/09"]
    assert browser.take_messages() == []


def test_more_than_can_be_compared_cannot_be_sent(browser, address):
    browser.show(1280, 900)
    _open(browser, address + "/datasets/walks/episodes")
    browser.run("document.querySelectorAll('#compare [type=checkbox]').forEach(e => e.click())")
    assert browser.run("document.querySelector('#selected').textContent") == (
        "12 selected, at most 8 are compared"
    )
    assert browser.run("document.querySelector('button[form=compare]').disabled")


def test_a_row_of_a_breakdown_leads_to_its_episodes_the_odd_ones_first(browser, address):
    browser.show(1280, 900)
    _open(browser, address + "/datasets/walks/episodes")
    browser.follow("a[href$='sort=repetition&order=descending']")
    browser.follow(".tools a[href*=breakdown]")
    browser.follow("a[href*='by=policy']")
    browser.follow("td a[href*='later']")
    assert browser.run("document.querySelector('#episodes .id').textContent") == "w/11"
    assert "Repetition" in browser.run(
        "document.querySelector('#episodes th[aria-sort]').innerText"
    )
    assert browser.take_messages() == []


def test_the_slider_moves_the_cursor_of_all_curves(browser, address):
    browser.show(1280, 900)
    _open(browser, address + "/datasets/walks/episode?id=w/09")
    browser.run("document.querySelector('#scrub').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    browser.wait_until("document.querySelector('#scrubbed').textContent === '3 of 11'")
    # The reward of step 3 is 3, and 3 + 4 + ... + 11 is 63.
    values = "[...document.querySelectorAll('.series .value')].map(e => e.textContent)"
    browser.wait_until(f"String({values}.slice(0, 2)) === '3,63'")
    _open(browser, address + "/datasets/images/episode?id=i/0")
    # A curve of one value, of 1 and of 0, has it in its middle.
    ranges = "[...plotGroups.values()][0].plots.map(p => [p.scales.y.min, p.scales.y.max])"
    assert [0, 2] in browser.run(ranges)
    assert [-1, 1] in browser.run(ranges)
    browser.run("document.querySelector('#scrub').focus()")
    browser.press("ArrowRight")
    browser.wait_until("document.querySelector('img').src.endsWith('&step=1')")
    browser.wait_until("document.querySelector('img').naturalWidth === 10")


def test_an_image_of_a_message_is_drawn(browser, tmp_path):
    frame = np.random.default_rng(0).integers(0, 255, (300, 900, 3), dtype=np.uint8)
    url = f"data:image/svg+xml;base64,{base64.b64encode(encode_png(frame)).decode()}"
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    click = {"name": "click", "arguments": json.dumps({"x": 12, "y": 40})}
    said = [{"role": "assistant", "tool_calls": [{"type": "function", "function": click}]}]
    lake = open_lake(tmp_path / "lake", create=True)
    episode = Episode(
        "s/0",
        observations=np.array(["?"], object),
        actions=np.array(["!"], object),
        rewards=np.ones(1),
        terminated=True,
        extras={
            "prompt_messages": [json.dumps(seen)],
            "completion_messages": [json.dumps(said)],
        },
    )
    lake.dataset("screens").append([episode])
    with _serve(lake) as address:
        browser.open(address + "/datasets/screens/episode?id=s/0")
        _check_all(browser, "a conversation with an image")
        browser.run("document.querySelector('.media img').scrollIntoView(); 0")
        browser.wait_until("document.querySelector('.media img').naturalWidth === 900")
        for width in (1280, 390):
            browser.show(width, 844)
            ratio = "(e => e.offsetWidth / e.offsetHeight)(document.querySelector('.media img'))"
            assert browser.run(ratio) == pytest.approx(3, abs=0.05)
        assert 'click({"x": 12, "y": 40})' in browser.run("document.body.innerText")
        assert browser.take_messages() == []
        browser.follow(".media a")
        assert browser.run("document.contentType") == "image/png"
    # A browser styles an image of its own page, which our policy does not let it.
    browser.take_messages()


def test_times_are_in_the_zone_of_the_reader(browser, address):
    browser.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    _open(browser, address + "/")
    written, shown = browser.run(
        "(() => { const e = document.querySelector('time'); return [e.dateTime, e.textContent] })()"
    )
    utc, tokyo = (int(text[11:13]) for text in (written, shown))
    assert (tokyo - utc) % 24 == 9
    browser.call("Emulation.setTimezoneOverride", timezoneId="")


def test_rows_follow_on_scrolling(browser, address, monkeypatch):
    monkeypatch.setattr("replaylake.serve.explorer.episodes.episodes_page._PAGE_ROWS", 5)
    browser.show(1280, 300)
    _open(browser, address + "/datasets/walks/episodes")
    browser.run("scrollTo(0, 1e6)")
    browser.wait_until("document.querySelectorAll('#episodes tbody tr').length === 12")
    ids = browser.run("[...document.querySelectorAll('#episodes .id')].map(e => e.textContent)")
    assert ids == [f"w/{n:02}" for n in range(12)]


def test_rows_that_cannot_be_read_are_said_and_can_be_read_again(
    browser, explored_lake, monkeypatch
):
    monkeypatch.setattr("replaylake.serve.explorer.episodes.episodes_page._PAGE_ROWS", 5)
    app = create_explorer(explored_lake)
    browser.show(1280, 300)
    with _run(app) as address:
        _open(browser, address + "/datasets/walks/episodes?where=num_steps+%3E+0")
        app.sandboxes = RequestQueue(0, 0)
        browser.run("scrollTo(0, 1e6)")
        browser.wait_until("document.querySelector('.more [role=alert]')")
        said = browser.run("document.querySelector('.more [role=alert]').textContent")
        assert "0 queries wait already; try again in some seconds" in said
        rows = "document.querySelectorAll('#episodes tbody tr').length"
        num = browser.run(rows)
        assert num < 12
        app.sandboxes = RequestQueue(4, 16)
        browser.run("window.isBefore = true; document.querySelector('a[data-next]').click()")
        browser.wait_until(f"!window.isBefore && document.readyState === 'complete' && {rows}")
        assert browser.run("document.querySelector('#episodes .id').textContent") == f"w/{num:02}"
    browser.take_messages()


def test_a_console_says_why_a_query_was_not_taken(browser, explored_lake):
    app = create_explorer(explored_lake)
    with _run(app) as address:
        browser.show(1280, 900)
        _open(browser, address + "/sql?q=SELECT+41+%2B+1+AS+x")
        app.sandboxes = RequestQueue(0, 0)
        browser.click("#q")
        browser.run("document.querySelector('#q').value = 'SELECT 7 AS x'; 0")
        browser.press("Enter", modifiers=2)
        status = "document.querySelector('#status').textContent"
        browser.wait_until(f"{status}.includes('queries wait already')")
        # The result before is still there, and the address is its own.
        assert browser.run("document.querySelector('#result td').textContent") == "42"
        assert "SELECT+41" in browser.run("location.search")
        app.sandboxes = RequestQueue(4, 16)
        browser.press("Enter", modifiers=2)
        browser.wait_until("document.querySelector('#result td')?.textContent === '7'", 30)
        assert "SELECT+7" in browser.run("location.search")
    browser.take_messages()


def test_the_console_completes_runs_cancels_and_remembers(browser, address):
    browser.show(1280, 900)
    _open(browser, address + "/sql")
    browser.run("localStorage.clear()")
    browser.click("#q")
    browser.type_text("SELECT count(*) AS n FROM walks.ep")
    browser.wait_until("!document.querySelector('.suggest').hidden")
    browser.press("Enter")
    assert browser.run("document.querySelector('#q').value").endswith("FROM walks.episodes")
    browser.press("Enter", modifiers=2)
    browser.wait_until("document.querySelector('#result td')", 30)
    assert browser.run("document.querySelector('#result td').textContent") == "12"
    assert "q=SELECT" in browser.run("location.search")
    slow = "SELECT max(sin(a.range * b.range)) AS x FROM range(100000) a, range(1000000) b"
    browser.run(f"document.querySelector('#q').value = {slow!r}; 0")
    browser.press("Enter", modifiers=2)
    browser.wait_until("!document.querySelector('#cancel').hidden")
    browser.click("#cancel")
    browser.wait_until("document.querySelector('#status').textContent === 'cancelled'")
    assert browser.run("document.querySelectorAll('#history li').length") == 2
    assert browser.take_messages() == []


def _submit(browser, work):
    """Do what sends a form, and wait until the page after it is there."""
    browser.run("window.isBefore = true; 0")
    work()
    browser.wait_until("!window.isBefore && document.readyState === 'complete'")


def test_the_worst_episodes_of_a_policy_are_labeled(browser, tmp_path, episode_maker, hostile):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("walks").append(
        [episode_maker(f"w/{n}", 9 - n, seed=n, text="old" if n < 3 else "new") for n in range(6)]
    )
    heading = "document.querySelector('h1').textContent"
    browser.show(1280, 900)
    with _serve(lake) as address:
        browser.open(address + "/datasets/walks")
        browser.run("localStorage.removeItem('replaylake keys')")
        browser.open(address + "/datasets/walks/episodes")
        browser.click("#where")
        browser.type_text("policy = 'new'")
        browser.press("Escape")
        _submit(browser, lambda: browser.press("Enter"))
        for _ in range(2):
            _submit(browser, lambda: browser.click("#episodes thead th:nth-child(2) a"))
        _submit(browser, lambda: browser.click(".tools a:nth-child(2)"))
        # The shortest has the lowest return.
        assert browser.run(heading) == "w/5"
        _check_all(browser, "an episode without labels")
        # Without a name nothing is sent: the browser asks for it.
        browser.press("f")
        assert browser.run("document.activeElement.name") == "by"
        browser.type_text(hostile)
        browser.press("Escape")
        browser.press("l")
        assert browser.run("document.activeElement.name") == "value"
        browser.type_text("too short")
        _submit(browser, lambda: browser.press("Enter"))
        assert browser.run(heading) == "w/4"
        assert "verdict of w/5 is too short" in browser.run("document.body.textContent")
        browser.run("document.querySelector('details.train').open = true; 0")
        _check_all(browser, "an episode of a queue")
        # The name is known, and 1 is the value that came first.
        _submit(browser, lambda: browser.press("1"))
        assert browser.run(heading) == "w/3"
        _submit(browser, lambda: browser.press("u"))
        assert browser.run(heading) == "w/4"
        _submit(browser, lambda: browser.press("n"))
        assert browser.run(heading) == "w/3"
        browser.press("l")
        browser.type_text(hostile.replace("\u202e", ""))
        _submit(browser, lambda: browser.press("Enter"))
        assert browser.run(heading) == "w/4"
        _submit(browser, lambda: browser.press("f"))
        _check_all(browser, "a flagged episode")
        _submit(browser, lambda: browser.press("1"))
        assert "No episode without verdict" in browser.run(heading)
        _check_all(browser, "the end of a queue")
        assert browser.run("document.title") != "owned"
        # Letters do nothing once the keys are turned off, also on the next page.
        browser.open(address + "/datasets/walks/episode?id=w/0")
        browser.click("#keys")
        browser.open(address + "/datasets/walks/episode?id=w/0")
        browser.press("f")
        assert browser.run("document.querySelector('kbd').hidden")
        browser.click("#keys")
        assert browser.take_messages() == []
    rows = lake.sql("""SELECT episode_id, any_value(verdict) AS verdict,
        bool_or(flagged) AS flagged, any_value(verdict_labeled_by) AS who
        FROM walks.steps GROUP BY 1 ORDER BY 1""").to_pylist()
    found = {row["episode_id"]: row["verdict"] for row in rows}
    assert found == {
        **{f"w/{n}": None for n in range(3)},
        "w/3": hostile.replace("\u202e", ""),
        "w/4": "too short",
        "w/5": "too short",
    }
    assert [row["episode_id"] for row in rows if row["flagged"]] == ["w/4"]
    assert {row["who"] for row in rows} == {None, hostile}


def test_why_a_gate_refused_is_seen(browser, gate_lake):
    pytest.importorskip("torch")
    from replaylake.cli.commands.explore import load_promote

    gate_lake.registry.set_alias("p", "champion", 2)
    panel = "document.querySelector('#promotion')?.textContent ?? ''"
    browser.show(1280, 900)
    with _serve(gate_lake, promote=load_promote()) as address:
        browser.open(address + "/policies")
        browser.follow("tbody a")
        browser.run("document.querySelector('.more-options').open = true; 0")
        _check_all(browser, "the form of a promotion")
        browser.run("document.querySelector('#promote-version').value = '1'; 0")
        for name, text in (("by", "Ada"), ("note", "<b>try</b>"), ("estimators", "ips snips")):
            browser.click(f"#promote-{name}")
            browser.run("document.activeElement.select()")
            browser.type_text(text)
        browser.click("input[name=unseen]")
        _submit(browser, lambda: browser.click("#promote button"))
        browser.wait_until(f"({panel}).includes('refused')", 60)
        assert "puts the difference from the champion at -" in browser.run(panel)
        _check_all(browser, "a promotion that was refused")
        # The newest report is shown already; the link has its address.
        browser.click("#promotion [role=status] a")
        browser.wait_until("location.search.startsWith('?evaluation=') && location.hash")
        browser.wait_until("document.querySelector('#evaluation .forest')")
        assert browser.run("document.querySelector('#promote-by').value") == "Ada"
        assert browser.take_messages() == []
    assert gate_lake.registry.alias_version("p", "champion") == 2


def test_two_runs_are_compared(browser, traced_lake):
    heading = "document.querySelector('h1').textContent"
    cells = "[...document.querySelectorAll('td')].map(e => e.textContent)"
    with _serve(traced_lake) as address:
        browser.show(1280, 900)
        _open(browser, address + "/")
        browser.follow("header nav a[href='/runs']")
        _check_all(browser, "runs that can be selected")
        assert browser.run("document.querySelector('button[form=compare]').disabled")
        browser.click("[value='01first']")
        assert browser.run("document.querySelector('button[form=compare]').disabled")
        browser.click("[value='02second']")
        browser.follow("button[form=compare]")
        browser.wait_until("document.querySelectorAll('.plot canvas').length === 1")
        assert browser.run(heading) == "02second and 01first"
        assert {"learning_rate", "0.2", "0.1"} <= set(browser.run(cells))
        names = browser.run("[...document.querySelectorAll('.series label')].map(e => e.innerText)")
        assert [name.split()[0] for name in names] == ["02second", "01first"]
        _check_all(browser, "two runs")
        browser.follow("a[href='/datasets/walks/diff?a=1&b=2']")
        assert browser.run(heading) == "walks: version 1 to 2"
        assert "w/4" in " ".join(browser.run(cells))
        assert browser.take_messages() == []


def test_a_decision_is_followed_to_its_data(browser, traced_lake):
    heading = "document.querySelector('h1')?.textContent"
    facts = "[...document.querySelectorAll('main > .facts dd')].map(e => e.textContent)"
    with _serve(traced_lake) as address:
        browser.show(1280, 900)
        _open(browser, address + "/")
        browser.follow("a[href='/serving/live']")
        _check_all(browser, "a log with its newest decisions")
        newest = "[aria-label='Newest decisions'] tbody"
        rows = browser.run(
            f"[...document.querySelectorAll({newest + ' tr'!r})].map(e => e.innerText)"
        )
        # The one that came last of those that earned something: c, of the second version.
        place = next(i for i, row in enumerate(rows, 1) if "clone:2" in row)
        browser.follow(f"{newest} tr:nth-child({place}) a")
        assert browser.run(heading) == "Decision"
        assert browser.run(facts)[1:] == ["clone:2", "1", "2", "8"]
        _check_all(browser, "a decision")
        decision = browser.run("location.href")
        # Each box of the way leads to its page.
        for name, shown in (("clone:2", "clone"), ("02second", "02second"), ("walks@2", "walks@2")):
            browser.open(decision)
            browser.run(
                "[...document.querySelectorAll('.flow a')].find("
                f"e => e.textContent === {name!r}).focus()"
            )
            browser.press("Enter")
            browser.wait_until(f"({heading}) === {shown!r}")
        browser.open(decision)
        browser.follow("[aria-label='Learned from'] tbody a[href*='where=']")
        assert browser.run("document.querySelectorAll('#episodes tbody tr').length") == 3
        browser.open(decision)
        browser.run("document.querySelector('.flow .stage:last-child a').focus()")
        browser.press("Enter")
        browser.wait_until(f"{heading}?.startsWith('served/')")
        # And back, from the step to its decision.
        steps = "[aria-label=Steps] td a[href^='/decision']"
        browser.follow(steps)
        assert browser.run(heading) == "Decision"
        assert browser.take_messages() == []


def test_a_result_is_drawn_by_the_keyboard_alone(browser, address):
    label = "document.querySelector('#chart-canvas').getAttribute('aria-label')"
    browser.show(1280, 900)
    query = "SELECT step, reward, episode_id FROM walks.steps WHERE episode_id = 'w/09'"
    _open(browser, address + "/sql?" + urlencode({"q": query}))
    browser.run("document.querySelector('#chart summary').focus(); 0")
    browser.press("Enter")
    browser.wait_until("document.querySelector('#chart canvas')")
    assert browser.run(label) == "reward by step: 12 points from 0 to 11"
    browser.press("Tab")
    for kind in ("bars", "points"):
        browser.press("ArrowDown")
        chosen = "document.activeElement.selectedOptions[0].textContent"
        assert browser.run(chosen) == kind
        _check_all(browser, kind)
    browser.press("Tab")
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    assert browser.run(label) == "reward by episode_id: 12 points from 0 to 11"
    _check_all(browser, "texts along the axis")
    assert not browser.run("document.querySelector('#chart-note').offsetHeight")
    # Bars of one text are one: 0 + 1 + ... + 11.
    browser.run(
        "document.querySelector('#chart-kind').value = 'bar';"
        "document.querySelector('#chart-kind').dispatchEvent(new Event('change')); 0"
    )
    assert browser.run(label) == "reward by episode_id: 1 points from 66 to 66"
    assert browser.run("document.querySelector('#chart-note').offsetHeight")
    # The chart of the next result is another one.
    browser.run("document.querySelector('#q').value = 'SELECT range AS n FROM range(5)'; 0")
    browser.run("document.querySelector('#q').focus(); 0")
    browser.press("Enter", modifiers=2)
    browser.wait_until("document.querySelectorAll('#result tbody tr').length === 5", 30)
    assert not browser.run("document.querySelector('#chart').open")
    browser.click("#chart summary")
    browser.wait_until(f"{label} === 'n by row: 5 points from 0 to 4'")
    assert browser.take_messages() == []


def test_the_checks_notice_what_they_are_for(browser, address):
    browser.show(390, 844)
    _open(browser, address + "/")
    script = """document.querySelector('main').innerHTML +=
        '<p id=small>small</p><p id=wide>wide</p><img src="/static/x.png"><p id=pale>pale</p>';
        document.querySelector('#small').style.fontSize = '9px';
        document.querySelector('#wide').style.width = '900px';
        document.querySelector('#pale').style.color = '#eee'; 0"""
    browser.run(script)
    found = " ".join(browser.run(_LAYOUT))
    assert "text of 9 px: small" in found
    assert "beyond the right edge: P" in found
    browser.run(_AXE.read_text())
    violations = " ".join(browser.run(_VIOLATIONS))
    assert "image-alt" in violations
    assert "color-contrast" in violations
    # A page cannot run what is written into it.
    browser.run(
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: \"document.title = 'owned'\"})); 0"
    )
    assert browser.run("document.title") != "owned"
    assert any("Content Security Policy" in one for one in browser.take_messages())


def _below(prefix, app):
    """Return an app as it is behind a proxy that forwards a path below a prefix without it."""

    async def forward(scope, receive, send):
        if scope["type"] == "http":
            assert scope["path"].startswith(f"{prefix}/"), scope["path"]
            scope = {**scope, "path": scope["path"].removeprefix(prefix)}
        await app(scope, receive, send)

    return forward


def test_lines_of_a_flow_meet_its_boxes(browser, served_address):
    browser.show(1280, 900)
    _open(browser, served_address + "/policies/clone")
    middles = """(() => {
      const middle = (box) => box.getBoundingClientRect().top + box.offsetHeight / 2;
      const svg = document.querySelectorAll('.flow svg')[1];
      const top = svg.getBoundingClientRect().top;
      const ends = [...svg.querySelectorAll('path')].map(
        (line) => top + Number(line.getAttribute('d').split(' ').pop()));
      const boxes = [...document.querySelectorAll('.flow .stage')[2].querySelectorAll('li')];
      return [ends.sort(), boxes.map(middle).sort()];
    })()"""
    ends, boxes = browser.run(middles)
    assert len(ends) == 2
    assert ends == pytest.approx(boxes)


def test_a_policy_acts_on_an_observation_by_the_keyboard_alone(browser, served_address):
    browser.show(1280, 900)
    _open(browser, served_address + "/policies/clone")
    browser.run("document.querySelector('#observation').focus(); 0")
    browser.run("document.querySelector('#observation').select(); 0")
    browser.type_text("[0, 1]")
    for _ in range(3):
        browser.press("Tab")
    assert browser.run("document.activeElement.textContent") == "Act"
    browser.press("Enter")
    browser.wait_until("document.querySelector('#action')")
    assert browser.run("document.querySelector('#action dd').textContent") == "1"
    assert browser.run("document.querySelector('#observation').value") == "[0, 1]"


def test_a_policy_server_shows_itself_and_acts(browser, package, serving):
    policy = load_policy(package)
    app = create_app(lambda: serving(policy))
    with _run(_below("/models/walker", app)) as address:
        for path in ("/", "/docs"):
            browser.open(f"{address}/models/walker{path}")
            for dark in (True, False):
                browser.show(1280, 900, dark=dark)
                _check_all(browser, path)
        browser.follow("header nav a")
        assert browser.run("location.pathname") == "/models/walker/"
        # With the keyboard alone: from the observation to the button.
        browser.run("document.querySelector('#observation').value = '[1, 0, 0, 1]'; 0")
        browser.run("document.querySelector('#seed').focus(); 0")
        browser.type_text("18446744073709551")
        browser.press("Enter")
        browser.wait_until("document.querySelector('#status').textContent.startsWith('200')")
        answer = json.loads(browser.run("document.querySelector('#try code').textContent"))
        expected = policy.act(np.array([[1, 0, 0, 1]], np.float32))
        assert answer["action"] == expected.actions[0]
        facts = browser.run("document.querySelector('#answer').textContent")
        assert f"action{answer['action']}" in facts
        _check_all(browser, "an answer")
        assert browser.take_messages() == []
        browser.run("document.querySelector('#observation').value = '[1, 0'; 0")
        browser.click("#try button")
        browser.wait_until("document.querySelector('#status').textContent.includes('no JSON')")
        browser.run("document.querySelector('#observation').value = '[1, 0]'; 0")
        browser.click("#try button")
        browser.wait_until("document.querySelector('#status').textContent.startsWith('422')")
        assert "observation" in browser.run("document.querySelector('#try code').textContent")


def test_a_policy_server_with_tokens_asks_for_them(browser, package, serving):
    admin, act = "admin-" * 4, "act-" * 6
    tokens = Tokens(((admin.encode(), "admin"), (act.encode(), "act")))
    app = create_app(lambda: serving(load_policy(package), tokens=tokens))
    with _run(app) as address:
        browser.open(address + "/docs")
        _check_all(browser, "token")
        browser.run("document.querySelector('#token').focus(); 0")
        # A server that is down is said so, in place of nothing.
        browser.run("window.request = fetch; window.fetch = () => Promise.reject(new Error()); 0")
        browser.type_text(admin)
        browser.press("Enter")
        browser.wait_until("document.querySelector('#unanswered')")
        said = browser.run("document.querySelector('#unanswered').textContent")
        assert said == "The server does not answer. Try again once it runs."
        browser.run("window.fetch = window.request; document.querySelector('#token').value = ''; 0")
        browser.type_text(admin)
        browser.press("Enter")
        browser.wait_until("document.title.startsWith('HTTP API')")
        # The tab remembers the token for other pages, and another tab does not have it.
        browser.follow("header nav a")
        browser.wait_until("document.querySelector('#try')")
        browser.take_messages()
        browser.click("#try button")
        browser.wait_until("document.querySelector('#status').textContent.startsWith('401')")
        browser.run("document.querySelector('#act-token').focus(); 0")
        browser.type_text(act)
        browser.press("Enter")
        browser.wait_until("document.querySelector('#status').textContent.startsWith('200')")
        assert all("401" in one for one in browser.take_messages())
        assert act not in browser.run("JSON.stringify(sessionStorage) + location.href")
