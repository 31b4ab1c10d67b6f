"""Make the pictures of docs/EXPLORER.md: `make pictures`, after `make demo`, with Chromium.

Pages of the demo's lake, and of datasets that are added to a copy of it: dialogues, samples of a
language agent with tokens, and movements of robot arms, whose numbers are drawn with a fixed seed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import numpy as np
import uvicorn
from browser_client import Browser

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.serve.explorer.app import create_explorer

_ROOT: Final = Path(__file__).resolve().parents[3]
_IMAGES: Final = _ROOT / "docs" / "images"
_DIALOGUES: Final = _ROOT / "examples" / "data" / "transcripts" / "results.json"
_CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome")
_ANSWERS: Final = (
    ("I add the tens first: 40 and 30 are 70. Then the ones: 7 and 8 are 15.\nSo 47 + 38 = 85.", 1),
    ("47 + 38 = 85, since 47 + 40 = 87 and 87 - 2 = 85.", 1),
    ("47 plus 38 is 75.", 0),
    ("Let me count: 47, 57, 67, 77, 85. The answer is 85.", 1),
    ("The answer is 85.", 1),
    ("47 + 38 = 47 + 38 = 47 + 38 = 47 + 38", 0),
    ("I think that it is 84.", 0),
    ("7 + 8 = 15, carry 1; 4 + 3 + 1 = 8. The answer is 85.", 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("demo/lake"), help="the demo's lake")
    parser.add_argument("--output", type=Path, default=_IMAGES)
    options = parser.parse_args()
    path = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if path is None or not options.demo.is_dir():
        sys.exit(f"found no Chromium, or no {options.demo}: expected both. Run make demo first")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "lake"
        shutil.copytree(options.demo, folder)
        with serve(open_lake(folder)) as address:
            take_pictures_of_demo(path, address, open_lake(folder), options.output)
        lake = open_lake(folder)
        command = [sys.executable, "-m", "replaylake.cli.main", "ingest", str(_DIALOGUES)]
        subprocess.run([*command, "--dataset", "airline", "--lake", str(folder)], check=True)
        add_samples(lake)
        add_movements(lake)
        with serve(lake) as address:
            take_other_pictures(path, address, lake, options.output)


@contextmanager
def serve(lake: Lake) -> Iterator[str]:
    """Serve the pages of a lake on a free port."""
    config = uvicorn.Config(create_explorer(lake), port=0, log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def take_pictures_of_demo(chromium: str, address: str, lake: Lake, output: Path) -> None:
    query = "SELECT episode_id FROM cartpole.episodes WHERE policy = 'clone' ORDER BY ALL LIMIT 1"
    served = lake.sql(query).to_pylist()[0]["episode_id"]
    episode = f"/datasets/cartpole/episode?{urlencode({'id': served})}"
    with open_browser(chromium) as browser:
        save(browser, f"{address}/", output / "explorer-lake.png")
        save(
            browser,
            f"{address}/datasets/cartpole",
            output / "explorer-dataset.png",
            height=860,
            dark=True,
        )
        browser.show(1280, 900)
        browser.open(address + episode)
        browser.run(
            "document.querySelector('#scrub').value = 60;"
            "document.querySelector('#scrub').dispatchEvent(new Event('input')); 0"
        )
        save(browser, None, output / "explorer-episode.png", height=1196)
        save(browser, f"{address}/serving/cartpole", output / "explorer-serving.png")


def take_other_pictures(chromium: str, address: str, lake: Lake, output: Path) -> None:
    query = "SELECT episode_id FROM airline.episodes ORDER BY num_steps DESC, episode_id LIMIT 1"
    dialogue = urlencode({"id": lake.sql(query).to_pylist()[0]["episode_id"]})
    with open_browser(chromium) as browser:
        save(
            browser,
            f"{address}/datasets/airline/episode?{dialogue}",
            output / "explorer-conversation.png",
            width=390,
            height=844,
            dark=True,
            scroll_to="Conversation",
        )
        save(
            browser,
            f"{address}/datasets/sums/group?{urlencode({'id': '47+38'})}",
            output / "explorer-group.png",
            width=1100,
        )
        save(
            browser,
            f"{address}/datasets/sums/episode?{urlencode({'id': '47+38#0'})}",
            output / "explorer-tokens.png",
            width=1100,
            height=532,
            scroll_to="Conversation",
        )
        save(
            browser,
            f"{address}/datasets/arms/breakdown?by=day&sort=jerk",
            output / "explorer-breakdown.png",
            width=1100,
            height=640,
        )


@contextmanager
def open_browser(chromium: str) -> Iterator[Browser]:
    browser = Browser(chromium)
    try:
        yield browser
    finally:
        browser.close()


def save(
    browser: Browser,
    url: str | None,
    file: Path,
    *,
    width: int = 1280,
    height: int | None = None,
    dark: bool = False,
    scroll_to: str | None = None,
) -> None:
    """Save the picture of a page, of its whole height or less.

    url: None for the page that is open. scroll_to: the heading of the panel that it begins with.
    """
    if url is not None:
        browser.show(width, 900, dark=dark)
        browser.open(url)
        browser.wait_until("!document.querySelector('[data-refresh]')")
    # Where the copy of the lake is says nothing to a reader.
    browser.run("document.querySelector('.where').textContent = 'demo/lake'; 0")
    end = browser.run("document.querySelector('footer').getBoundingClientRect().bottom + scrollY")
    browser.show(width, height or round(end), dark=dark)
    browser.run("dispatchEvent(new Event('resize')); scrollTo(0, 0); 0")
    if scroll_to is not None:
        browser.run(
            "[...document.querySelectorAll('h2')].find("
            f"(one) => one.textContent === {scroll_to!r}).closest('section').scrollIntoView();"
            "scrollBy(0, -14); 0"
        )
    browser.wait_for_frames()
    browser.run("new Promise((done) => setTimeout(done, 300))")
    browser.save_picture(file)
    print(f"made {file}")


def add_samples(lake: Lake) -> None:
    """Add the samples of a prompt, a token a character."""
    rng = np.random.default_rng(0)
    episodes = []
    for number, (text, reward) in enumerate(_ANSWERS):
        # The first letters of words and all digits are less certain than what follows.
        is_open = [
            place == 0 or text[place - 1].isspace() or letter.isdigit()
            for place, letter in enumerate(text)
        ]
        log_probs = [-float(rng.exponential(0.7 if uncertain else 0.04)) for uncertain in is_open]
        episodes.append(
            Episode(
                f"47+38#{number}",
                observations=np.array(["What is 47 + 38?"], object),
                actions=np.array([text], object),
                rewards=np.array([float(reward)]),
                terminated=True,
                policies=np.array(["adder"], object),
                policy_versions=np.array([12]),
                extras={
                    "observation_tokens": [[ord(letter) for letter in "What is 47 + 38?"]],
                    "action_tokens": [[ord(letter) for letter in text]],
                    "action_log_probs": [log_probs],
                    "group_id": ["47+38"],
                },
            )
        )
    lake.dataset("sums").append(episodes)


def add_movements(lake: Lake) -> None:
    """Add two weeks of movements, which are not smooth on one of the days."""
    rng = np.random.default_rng(0)
    first = datetime(2026, 11, 10, 8, tzinfo=UTC)
    episodes = []
    for day in range(14):
        for number in range(8):
            steps = np.arange(60)
            phases = rng.uniform(0, 6, 6)
            noise = 0.03 if day == 9 else 0.01
            actions = np.sin(steps[:, None] / 9 + phases) + rng.normal(0, noise, (60, 6))
            start = first + timedelta(days=day, minutes=20 * number)
            start_us = round(start.timestamp() * 1e6)
            episodes.append(
                Episode(
                    f"arms/{day:02}-{number}",
                    observations=np.cumsum(actions, axis=0).astype(np.float32),
                    actions=actions.astype(np.float32),
                    rewards=np.full(60, 0.1),
                    terminated=True,
                    timestamps=start_us + 100_000 * steps,
                    extras={"arm": np.array([f"arm {number % 2 + 1}"] * 60, object)},
                )
            )
    lake.dataset("arms").append(episodes)


if __name__ == "__main__":
    main()
