"""A dataset's page: its contents, versions and what came of it."""

from dataclasses import replace
from shutil import copytree

from replaylake.datastore.feedback.set_aside import join_producer
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.profile.profile import compute_profile
from replaylake.serve.explorer.datasets.dataset_page import shorten_type
from replaylake.serve.pages.profile_sections import describe_sample


def test_a_dataset_shows_what_it_holds(explored):
    page = explored.page("/datasets/walks")
    headings = [text for text in page.texts if text in ("Episodes", "Versions", "Trained on it")]
    assert set(headings) == {"Episodes", "Versions", "Trained on it"}
    body = explored.json("/datasets/walks.json")
    assert (body["num_episodes"], body["num_steps"], body["version"]) == (12, 102, 2)
    assert sum(body["profile"]["returns"]["counts"]) == 12
    assert "No run of this lake has learned from it." in page.text


def test_what_is_a_sample_says_so_with_its_size(explored):
    assert "means are of all steps, and so are histograms." in explored.page("/datasets/walks").text
    profile = replace(compute_profile(explored.lake.snapshot("walks")), num_sampled=50)
    assert "are of a sample of 50 of them, evenly spread." in describe_sample(profile)


def test_bars_of_the_returns_lead_to_all_episodes(explored):
    page = explored.page("/datasets/walks")
    links = [link for link in page.links if "/episodes?where=" in link and "return" in link]
    # Returns are 3, 6, ..., 91: edges in 40 equal bins.
    assert len(links) == 40
    assert "%22return%22+%3E%3D+3.0" in links[0]
    assert links[-1].endswith("%3C%3D+91.0")


def test_an_older_version_is_named_by_number_or_tag(explored):
    for at in ("1", "first"):
        page = explored.page(f"/datasets/walks?at={at}")
        assert "walks@1" in page.texts
        assert "This is version 1. Version 2 is the newest." in page.text
    assert explored.json("/datasets/walks.json?at=first")["num_episodes"] == 11


def test_versions_have_their_tags_and_diffs(explored):
    page = explored.page("/datasets/walks")
    assert "first" in page.texts
    assert "/datasets/walks/diff?a=1&b=2" in page.links


def test_the_diff_of_two_versions(explored):
    page = explored.page("/datasets/walks/diff?a=1&b=2")
    assert "w/11" in page.texts
    body = explored.json("/datasets/walks/diff.json?a=1&b=2")
    assert body["episodes"] == {"added": 1, "removed": 0, "changed": 0}
    assert body["steps"]["added"] == 14
    assert (
        "Both versions hold the same steps." in explored.page("/datasets/walks/diff?a=2&b=2").text
    )


def test_names_that_are_not_there_are_pages_in_plain_words(explored):
    for path in ("/datasets/nothing", "/datasets/walks?at=99", "/datasets/walks?at=later"):
        page = explored.page(path, 404)
        assert "Go to the lake" in page.texts
    assert explored.page("/datasets/No%20Such", 404)


def test_a_dataset_without_steps_says_so(explored_lake, empty, reader_type):
    lake = empty.lake
    spec = explored_lake.dataset("walks").spec
    lake.dataset("bare").create(spec.observation_space, spec.action_space)
    page = empty.page("/datasets/bare")
    assert "This version has no steps." in page.text
    assert empty.page("/").texts.count("bare") == 1


def test_hostile_texts_are_texts(explored, hostile):
    page = explored.page("/datasets/hostile")
    assert f"{hostile}:1" in page.texts


def test_one_row_makes_a_page(explored):
    assert explored.json("/datasets/one.json")["num_steps"] == 1
    assert "one@1" in explored.page("/datasets/one").texts


def test_a_damaged_shard_is_named(explored_lake, tmp_path, reader_type):
    copytree(explored_lake.path, tmp_path / "lake")
    lake = open_lake(tmp_path / "lake")
    (entry,) = lake.snapshot("one").files
    next((tmp_path / "lake").rglob(entry.path.rpartition("/")[2])).unlink()
    reader = reader_type(lake)
    page = reader.page("/datasets/one", 400)
    assert entry.path.rpartition("/")[2] in page.text
    assert reader.client.get("/datasets/walks").status_code == 200


def test_the_feedback_join_is_named_as_the_writer(empty, episode_maker):
    producer = join_producer("joined")
    empty.lake.dataset("joined").append([episode_maker("e/0", 2)], producer=producer, sequence=1)
    assert "feedback join" in empty.page("/").texts
    page = empty.page("/datasets/joined")
    assert "feedback join" in page.texts
    # The name at rest is under the pointer.
    assert producer in [a["title"] for _, a in page.tags if "title" in a]


def test_types_are_short():
    assert shorten_type("fixed_size_list<element: float not null>[4]") == "float[4]"
    assert shorten_type("dictionary<values=string, indices=int32, ordered=0>") == "string"


def test_few_steps_have_a_column_each(explored):
    explored.page("/datasets/hostile")
    text = explored.client.get("/datasets/hostile").text
    panel = text.partition("Policy versions</h2>")[2].partition("</section>")[0]
    # Five steps of one version, side by side without gaps.
    assert 'viewBox="0 0 50 100"' in panel
    assert panel.count('height="100" class="c0"') == 5
