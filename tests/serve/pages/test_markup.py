"""Markup: every text is text, and no attribute runs anything."""

import json

import pytest

from replaylake.serve.pages.markup import Markup, data_block, join, tag

HOSTILE = "</p><script>alert('1')</script>&\"\0"


def test_texts_are_escaped_and_elements_are_not():
    inner = tag("b", HOSTILE)
    assert tag("p", inner, None, [1, " ", 2.5], class_="a") == (
        '<p class="a"><b>&lt;/p&gt;&lt;script&gt;alert(\'1\')&lt;/script&gt;&amp;"\ufffd</b>'
        "1 2.5</p>"
    )
    # Text joined to an element is a text again, and so is escaped.
    assert tag("p", "" + inner) == tag("p", str(inner))
    assert "&lt;b&gt;" in tag("p", "" + inner)


def test_attributes():
    assert tag("input", value="<'\"&\0", disabled=True, checked=False, title=None) == (
        '<input value="&lt;&#x27;&quot;&amp;\ufffd" disabled>'
    )
    assert tag("label", for_="x", aria_label="y") == '<label for="x" aria-label="y"></label>'
    for name in ("onclick", "style"):
        with pytest.raises(ValueError, match=name):
            tag("p", **{name: "x"})


@pytest.mark.parametrize("link", ["javascript:alert(1)", "data:text/html,x", "http://x", " /x", ""])
def test_links_lead_into_the_pages(link):
    with pytest.raises(ValueError, match="href"):
        tag("a", "x", href=link)
    assert tag("a", "x", href="/x?y=1&z") == '<a href="/x?y=1&amp;z">x</a>'


def test_data_cannot_end_its_block():
    block = data_block("data", {"text": "</script><!--" + HOSTILE + "\ud800"})
    inside = block.removeprefix('<script type="application/json" id="data">')
    inside = inside.removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside)["text"].startswith("</script><!--")
    with pytest.raises(ValueError, match="JSON"):
        data_block("data", float("nan"))


def test_what_utf_8_lacks_is_replaced():
    assert join("a\ud800b", Markup("<i>")) == "a\ufffdb<i>"
