"""Page: a profile as one HTML file that needs nothing else, neither scripts nor a network."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from replaylake.serve.pages.markup import tag
from replaylake.serve.pages.profile_sections import describe_sample, profile_sections
from replaylake.serve.pages.texts import count, size

if TYPE_CHECKING:
    from replaylake.datastore.lake.profile.profile import Profile

_STYLE: Final = """
body { max-width: 66rem; margin: 2rem auto; padding: 0 1rem; background: var(--panel) }
h2 { margin: 2rem 0 .3rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem }
"""


def html(profile: Profile) -> str:
    """Return the page. What comes from data is escaped: a column may be called `<script>`."""
    summary = profile.summary
    title = f"{summary['dataset']}@{summary['version']}"
    style = files("replaylake.serve.pages").joinpath("page.css").read_text("utf-8") + _STYLE
    body = [
        tag("h1", title),
        tag(
            "p",
            f"{count(summary['num_episodes'], 'episode')}, {count(summary['num_steps'], 'step')}, "
            f"{count(summary['num_shards'], 'shard')}, {size(summary['num_bytes'])}",
            class_="note",
        ),
        tag(
            "p",
            f"observation {summary['observation_space']}; action {summary['action_space']}. "
            + describe_sample(profile),
            class_="note",
        ),
        [(tag("h2", one.title), one.body) for one in profile_sections(profile)],
    ]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
    ]
    # The style is ours alone; in its element a browser reads no escapes.
    return (
        f'<!doctype html>\n<html lang="en"><head>{"".join(head)}<style>{style}</style></head>\n'
        f"{tag('body', body)}\n</html>\n"
    )
