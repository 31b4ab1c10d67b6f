"""Tokens of the role table: who reads, who labels, and who promotes."""

import hashlib

import pytest

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.roles import read_role_table
from replaylake.datastore.maintenance.labels.episode_labels import read_episode_labels
from replaylake.serve.explorer.config import ExplorerConfig
from replaylake.serve.explorer.visits.forms import TOKEN_FIELD
from replaylake.serve.safety.tokens import Tokens

ADMIN = "the-token-of-the-admin"
ROLES = {
    "reads": 'reader = ["*"]',
    "labels-log": 'reader = ["*"]\nlabeler = ["log"]',
    "labels-all": 'reader = ["*"]\nlabeler = ["*"]',
    "promotes": 'reader = ["*"]\noperator = ["*"]',
    "promotes-log": 'reader = ["*"]\noperator = ["log"]',
    "reads-log": 'reader = ["log"]',
    "reads-some": 'reader = ["*"]\ncolumns = {log = ["reward"]}',
    "writes": 'writer = ["*"]\nlabeler = ["*"]\noperator = ["*"]',
}
EPISODE = "/datasets/log/episode?id=e/000"
LABEL = "/datasets/log/label"
POLICY = "/policies/p"


def _token_of(name):
    return f"a-token-that-{name}"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "roles.toml"
    path.write_text(
        "\n".join(
            f'[[tokens]]\nname = "{name}"\n'
            f'sha256 = "{hashlib.sha256(_token_of(name).encode()).hexdigest()}"\n{roles}'
            for name, roles in ROLES.items()
        )
    )
    return path


@pytest.fixture
def open_as(gate_lake, reader_type, table):
    """Return a reader who has signed in with a token, for an explorer that lets some promote."""

    def promote(lake, request, on_stage):
        raise NotFoundError("promote: found no gate in this test, expected none.")

    def sign_in(token, **options):
        tokens = Tokens(((ADMIN.encode(), "admin"),), read_role_table(table))
        reader = reader_type(gate_lake, tokens=tokens, promote=promote, **options)
        answer = reader.client.post("/sign-in", data={"token": token}, follow_redirects=False)
        reader.signed_in = answer
        return reader

    return sign_in


def _forms(reader, path):
    return {attributes.get("action") for tag, attributes in reader.page(path).tags if tag == "form"}


@pytest.mark.parametrize(
    ("token", "can_label", "can_promote"),
    [
        (ADMIN, True, True),
        (_token_of("reads"), False, False),
        (_token_of("labels-log"), True, False),
        (_token_of("labels-all"), True, False),
        (_token_of("promotes"), False, True),
        # A policy is of no dataset, and its alias is followed by servers of any.
        (_token_of("promotes-log"), False, False),
    ],
)
def test_a_role_has_its_forms_and_no_others(open_as, token, can_label, can_promote):
    reader = open_as(token)
    assert reader.signed_in.status_code == 303
    assert token not in reader.signed_in.headers["set-cookie"]
    assert (LABEL in _forms(reader, EPISODE)) == can_label
    assert (f"{POLICY}/promote" in _forms(reader, POLICY)) == can_promote
    assert ("Label these" in reader.page("/datasets/log/episodes").texts) == can_label
    # Whoever has one form has its token, and cannot use it for another.
    fields = reader.fields(EPISODE, "labels") | {"value": "good"}
    fields[TOKEN_FIELD] = {**reader.fields(POLICY, "promote"), **fields}.get(TOKEN_FIELD, "none")
    answer = reader.post(LABEL, {"label": "verdict", "id": "e/000", **fields, "by": "Ada"})
    assert (answer.status_code == 403) == (not can_label), answer.text
    (labeled,) = reader.lake.sql("SELECT * FROM log.steps WHERE episode_id = 'e/000'").to_pylist()
    assert (labeled.get("verdict") == "good") == can_label
    promotion = {**fields, "by": "Ada", "version": "2", "alias": "champion", "dataset": "log"}
    answer = reader.post(f"{POLICY}/promote", promotion)
    assert (answer.status_code == 403) == (not can_promote)
    if can_label and not can_promote:
        assert "has no role operator for all datasets" in answer.text
    assert (reader.app._promotions.find("p")[0] is not None) == can_promote


@pytest.mark.parametrize(
    ("token", "by", "recorded"),
    [
        (ADMIN, "Ada", "Ada"),
        (_token_of("labels-log"), "Ada", "Ada (token labels-log)"),
        (_token_of("labels-log"), "", "token labels-log"),
    ],
)
def test_a_label_has_the_name_of_its_token(open_as, token, by, recorded):
    reader = open_as(token)
    sent = reader.fields(EPISODE, "labels") | {"label": "verdict", "value": "good", "by": by}
    answer = reader.post(LABEL, sent)
    assert answer.status_code == 303, answer.text
    labels = read_episode_labels(reader.lake.snapshot("log"), episode_id="e/000", agent_id="")
    assert labels["verdict"].by == recorded
    # The form offers the name that was given, and not the token's once more.
    assert reader.fields(EPISODE, "labels")["by"] == by


@pytest.mark.parametrize(
    ("token", "by", "recorded"),
    [
        (ADMIN, "Ada", "Ada"),
        (_token_of("promotes"), "Ada", "Ada (token promotes)"),
        (_token_of("promotes"), "", "token promotes"),
    ],
)
def test_a_promotion_has_the_name_of_its_token(open_as, token, by, recorded):
    reader = open_as(token)
    sent = reader.fields(POLICY, "promote")
    answer = reader.post(
        f"{POLICY}/promote",
        sent | {"by": by, "version": "2", "alias": "champion", "dataset": "log"},
    )
    assert answer.status_code == 303, answer.text
    assert reader.app._promotions.find("p")[0].request.by == recorded


def test_a_labeler_of_one_dataset_labels_no_other(open_as, episode_maker):
    reader = open_as(_token_of("labels-log"))
    reader.lake.dataset("walks").append([episode_maker("w/0", 3)])
    page = reader.page("/datasets/walks/episode?id=w/0")
    assert "/datasets/walks/label" not in [attributes.get("action") for _, attributes in page.tags]
    sent = reader.fields(EPISODE, "labels") | {"id": "w/0", "value": "b", "by": "Ada"}
    answer = reader.post("/datasets/walks/label", sent)
    assert answer.status_code == 403
    assert "labels-log" in answer.text
    assert "has no role labeler for dataset walks" in answer.text


@pytest.mark.parametrize("name", ["reads-log", "reads-some", "writes"])
def test_who_may_not_read_all_reads_nothing(open_as, name):
    reader = open_as(_token_of(name))
    assert reader.signed_in.status_code == 403
    assert "may not read every column of every dataset" in reader.signed_in.text
    assert reader.client.get("/").status_code == 401
    headers = {"authorization": f"Bearer {_token_of(name)}"}
    assert reader.client.get("/index.json", headers=headers).status_code == 403


def test_scripts_send_a_token_of_the_table_in_a_header(open_as):
    reader = open_as("a-token-of-nobody-at-all")
    assert reader.signed_in.status_code == 401
    for presented, status in ((_token_of("reads"), 200), ("unknown-token-of-24-chars", 401)):
        headers = {"authorization": f"Bearer {presented}"}
        assert reader.client.get("/index.json", headers=headers).status_code == status
    # The hash in the table is no token.
    hashed = hashlib.sha256(_token_of("reads").encode()).hexdigest()
    for header in (f"Bearer {hashed}", f"Bearer sha256:{hashed}"):
        answer = reader.client.get("/index.json", headers={"authorization": header})
        assert answer.status_code == 401


def test_a_table_alone_is_enough_for_another_address(table):
    config = ExplorerConfig("lake", roles_file=table)
    tokens = config.read_tokens({})
    config.check_exposure("0.0.0.0", tokens)
    assert len(tokens.table.grants) == len(ROLES)
