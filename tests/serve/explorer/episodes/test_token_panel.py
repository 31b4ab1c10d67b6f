"""The panel of an episode's sampled tokens: windows, shades, texts and versions."""

import json
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.serve.explorer.episodes import token_panel
from replaylake.serve.explorer.visits.token_texts import TokenTexts


def _tokens(page):
    """Return the tokens of a page as (class of the shade, title, text)."""
    shown, texts = [], iter(page.drawn)
    for tag, attributes in page.tags:
        if tag == "span" and attributes.get("title", "").startswith("id "):
            shown.append((attributes["class"].split()[1], attributes["title"], next(texts)))
    return shown


@pytest.fixture
def show(explored, page_type):
    """Return a function that reads an episode of `chats`."""

    class Drawn(page_type):
        def __init__(self, html):
            self.drawn, self._is_token = [], False
            super().__init__(html)

        def handle_starttag(self, tag, attrs):
            super().handle_starttag(tag, attrs)
            self._is_token = tag == "span" and dict(attrs).get("title", "").startswith("id ")

        def handle_data(self, data):
            super().handle_data(data)
            if self._is_token:
                self.drawn.append(data)

    def show(episode, reader=explored, dataset="chats", **query):
        values = urlencode({"id": episode, **query})
        answer = reader.client.get(f"/datasets/{dataset}/episode?{values}")
        assert answer.status_code == 200, answer.text
        return Drawn(answer.text)

    return show


def test_tokens_are_texts_shaded_by_their_probability(show, hostile):
    page = show(f"{hostile}#0")
    shown = _tokens(page)
    text = hostile + "ok\n" + hostile
    assert "".join(text for _, _, text in shown) == text.replace("\n", "\u21b2\n")
    # The log-probs of a step's tokens are 0, -0.25, -0.5, ...: probabilities 1, 0.78, 0.61, ...
    assert [shade for shade, _, _ in shown[:4]] == ["s0", "s1", "s1", "s2"]
    assert shown[1][1] == (
        f"id {ord(hostile[1])}, log-prob -0.25, probability 0.779, mismatch -0.2, version 3"
    )
    assert f"Tokens 1 to {len(text)} of {len(text)}." in page.text


@pytest.mark.parametrize("window", [3, 4])
def test_windows_hold_every_token_once(show, monkeypatch, window, empty, generations_maker):
    monkeypatch.setattr(token_panel, "_WINDOW", window)
    empty.lake.dataset("long").append([generations_maker("e", ["abcd", "", "ef", "ghijk"])])
    found = []
    for place in range(0, 11, window):
        page = show("e", empty, "long", token=place)
        shown = _tokens(page)
        assert len(shown) <= window
        assert f"Tokens {place + 1} to {place + len(shown)} of 11." in page.text
        found += [(text, title.split(", ")[1]) for _, title, text in shown]
    assert "".join(text for text, _ in found) == "abcdefghijk"
    # Each keeps its own values, also where a step is cut.
    assert [said for _, said in found] == [
        f"log-prob {-0.25 * place:.4g}" for length in (4, 2, 5) for place in range(length)
    ]


def test_a_window_that_cuts_a_step_says_which_part_it_shows(show, monkeypatch):
    monkeypatch.setattr(token_panel, "_WINDOW", 5)
    page = show("tree#0", agent="solver", token=5)
    assert "tokens 2 to 3 of 3" in page.text
    assert "tokens 1 to 3 of 4" in page.text
    links = [link for link in page.links if link.endswith("#tokens")]
    assert any("token=10" in link and "agent=solver" in link for link in links)
    # The first window has no such value, and its links keep the agent.
    assert any("token=" not in link and "shade" not in link for link in links)


def test_shades_by_mask_version_and_mismatch(show, empty, generations_maker):
    masks = {
        "action_loss_mask": [[True, False, True], None],
        "is_trainable": [True, False],
        "action_versions": [[{"start": 0, "version": 4}, {"start": 2, "version": 13}], None],
        "proximal_log_probs": [[0.0, -0.3, -9.0], None],
    }
    empty.lake.dataset("masked").append([generations_maker("e", ["abc", "d"], **masks)])

    def shades(name):
        return [shade for shade, _, _ in _tokens(show("e", empty, "masked", shade=name))]

    assert shades("mask") == ["s0", "s-out", "s0", "s-out"]
    # Of eight colors: version 13 has that of 5.
    assert shades("version") == ["v4", "v4", "v5", "v3"]
    # Differences 0, -0.05 and -8.5, and one that is not known.
    assert shades("mismatch") == ["s0", "s1", "s4", "s-unknown"]
    page = show("e", empty, "masked", shade="version")
    assert "version 13" in page.text
    assert ("a", "true") in [(tag, a.get("aria-current")) for tag, a in page.tags]


def test_values_that_were_added_later_are_shown(show, empty, generations_maker):
    episode = generations_maker("e", ["abc"])
    del episode.extras["proximal_log_probs"]
    empty.lake.dataset("late").append([episode])
    page = show("e", empty, "late")
    assert not any("shade=mismatch" in link for link in page.links)
    labels = pa.table({"episode_id": ["e"], "step": [0], "new": [[-0.5, -0.5, -0.5]]})
    annotate(
        empty.lake, "late", labels, on=["episode_id", "step"], add={"proximal_log_probs": "new"}
    )
    page = show("e", empty, "late", shade="mismatch")
    assert [title.split(", ")[3] for _, title, _ in _tokens(page)] == [
        "mismatch -0.5",
        "mismatch -0.25",
        "mismatch +0",
    ]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"token": "-1"}, "from 0 to 10"),
        ({"token": "11"}, "from 0 to 10"),
        ({"token": "\u0663"}, "from 0 to 10"),
        ({"shade": "x"}, "expected one of log_prob, mask, version, mismatch"),
    ],
)
def test_another_window_or_shade_is_refused_in_words(explored, query, said):
    values = urlencode({"id": "tree#0", "agent": "solver", **query})
    assert said in explored.page(f"/datasets/chats/episode?{values}", 400).text


def test_ids_have_the_texts_of_the_tokenizer_that_the_dataset_states(
    show, tmp_path, empty, reader_type, generations_maker
):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"<b>": 5, "\u2581two": 6}}}))
    texts = TokenTexts([path])
    ids = {
        "action_tokens": [[5, 6, 9]],
        "action_log_probs": [[-0.5] * 3],
        "proximal_log_probs": [None],
        "action_advantages": [[0.0] * 3],
    }
    empty.lake.dataset("plain").append([generations_maker("e", ["<b> two."], **ids)])
    reader = reader_type(empty.lake, token_texts=texts)
    page = show("e", reader, "plain")
    assert [text for _, _, text in _tokens(page)] == ["<b>", " two", "9 "]
    assert "Ids whose text is not known are numbers." in page.text
    assert [text for _, _, text in _tokens(show("e", empty, "plain"))] == ["5 ", "6 ", "9 "]
    # Of a dataset that states another tokenizer, it has no texts.
    other = Tokenizer("other", sha256="0" * 64)
    assert texts.find(other) == ()
    assert texts.find(None)[5] == "<b>"
    second = tmp_path / "second.json"
    second.write_text(json.dumps({"model": {"vocab": {"x": 5}}}))
    assert TokenTexts([path, second]).find(None) == ()
    second.write_text("[]")
    with pytest.raises(ConfigInvalidError, match=r"second\.json"):
        TokenTexts([second])


def test_ids_that_only_look_like_characters_are_ids(show, empty, generations_maker):
    # As many as the text has characters, and others.
    ids = {"action_tokens": [[ord("a"), 98, 500]]}
    empty.lake.dataset("ids").append([generations_maker("e", ["abc"], **ids)])
    assert [text for _, _, text in _tokens(show("e", empty, "ids"))] == ["97 ", "98 ", "500 "]


def test_a_step_of_200_000_tokens_is_shown_in_windows(show, empty, generations_maker):
    empty.lake.dataset("long").append([generations_maker("e", ["a" * 200_000])])
    page = show("e", empty, "long", token=198_000)
    assert len(_tokens(page)) == 2000
    assert "Tokens 198,001 to 200,000 of 200,000." in page.text
    assert np.isclose(
        float(_tokens(page)[-1][1].split("log-prob ")[1].split(",")[0]), -49_999.75, rtol=1e-3
    )


def test_episodes_without_tokens_have_no_such_panel(explored):
    assert "Sampled tokens" not in explored.page("/datasets/walks/episode?id=w/02").text
