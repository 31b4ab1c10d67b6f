"""Bearer tokens: where they come from, whom they let in, and what is never said of them."""

from hashlib import sha256

import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.safety.limits import Safety, check_exposure
from replaylake.serve.safety.tokens import Tokens, read_tokens, role_of

ONE, TWO, OTHER = "one-" * 8, "two-" * 8, "other-" * 6


def status(tokens, role, header):
    try:
        tokens.check(role, header)
    except RequestRefusedError as error:
        return error.status
    return 200


def bearer(token):
    return f"Bearer {token}".encode()


def test_routes_have_roles_and_an_unlisted_one_is_the_admins():
    # What was decided elsewhere is reported, as episodes are: a token of `act` cannot forge it.
    assert role_of("/decisions") == "feedback"
    assert [role_of(route) for route in ("/act", "/feedback", "/episodes")] == [
        "act",
        "feedback",
        "feedback",
    ]
    model = "/v2/models/{name}"
    for path in (model, f"{model}/versions/{{version}}"):
        assert {role_of(f"{path}{end}") for end in ("", "/ready", "/infer")} == {"act"}
    assert role_of("/v2") is role_of("/v2/health/live") is role_of("/v2/health/ready") is None
    assert role_of("/livez") is role_of("/readyz") is role_of("/static") is None
    assert {role_of(r) for r in ("/metrics", "/policy", "/docs.json", "/", "/docs", "/new")} == {
        "admin"
    }


def test_each_role_has_its_tokens_and_a_role_without_any_is_closed(tmp_path):
    path = tmp_path / "act"
    path.write_text(f"# rotated in May\n{ONE}\n\n  {TWO}  \n")
    tokens = read_tokens({"act": path}, {"REPLAYLAKE_FEEDBACK_TOKEN": OTHER})
    assert status(tokens, "act", bearer(ONE)) == status(tokens, "act", bearer(TWO)) == 200
    assert status(tokens, "act", bearer(OTHER)) == 403
    assert status(tokens, "feedback", bearer(OTHER)) == 200
    assert status(tokens, "feedback", bearer(ONE)) == 403
    for header in (None, b"", b"Bearer", bearer(ONE[:-1]), bearer(ONE + "x"), ONE.encode()):
        assert status(tokens, "act", header) == 401
    assert [status(tokens, "admin", bearer(token)) for token in (ONE, OTHER)] == [403, 403]
    assert tokens.roles == {"act", "feedback"}


def test_without_tokens_nothing_is_asked_for():
    tokens = read_tokens({}, {})
    assert tokens.is_empty
    assert status(tokens, "admin", None) == 200


def test_a_token_may_serve_two_roles():
    tokens = read_tokens({}, {"REPLAYLAKE_ACT_TOKEN": ONE, "REPLAYLAKE_ADMIN_TOKEN": ONE})
    assert status(tokens, "act", bearer(ONE)) == status(tokens, "admin", bearer(ONE)) == 200
    assert status(tokens, "feedback", bearer(ONE)) == 403


@pytest.mark.parametrize("text", ["", "\n# none\n", "short", "with space " * 3, "é" * 20])
def test_a_token_that_is_none_is_refused_without_being_said(tmp_path, text):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigInvalidError, match="tokens") as caught:
        read_tokens({"act": path}, {})
    assert not text.strip() or text.strip() not in str(caught.value).replace(str(path), "")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigInvalidError, match="absent"):
        read_tokens({"act": tmp_path / "absent"}, {})
    (tmp_path / "huge").write_bytes(b"x" * 70_000)
    with pytest.raises(ConfigInvalidError, match="huge"):
        read_tokens({"act": tmp_path / "huge"}, {})


def test_tokens_are_in_no_repr_and_no_variable_that_we_set(tmp_path):
    path = tmp_path / "act"
    path.write_text(ONE)
    assert ONE not in repr(read_tokens({"act": path}, {}))
    assert repr(Tokens()) == "Tokens()"
    safety = Safety(act_token_file=path)
    assert ONE not in str(safety.to_environment())


def test_other_machines_are_served_with_tokens_or_insecurely(tmp_path, monkeypatch):
    for role in ("ACT", "FEEDBACK", "ADMIN"):
        monkeypatch.delenv(f"REPLAYLAKE_{role}_TOKEN", raising=False)
    for address in ("0.0.0.0", "::", "10.1.2.3"):
        with pytest.raises(ConfigInvalidError, match="`insecure`"):
            check_exposure(address, Safety())
        check_exposure(address, Safety(insecure=True))
    for address in ("127.0.0.1", "::1", "127.8.8.8"):
        check_exposure(address, Safety())
    path = tmp_path / "act"
    path.write_text(ONE)
    assert check_exposure("0.0.0.0", Safety(act_token_file=path)).roles == {"act"}


def test_safety_survives_the_way_through_the_environment(tmp_path):
    safety = Safety(
        act_token_file=tmp_path / "a",
        insecure=True,
        access_log=str(tmp_path / "log"),
        body_bytes=5,
        deadline_s=2.5,
        queue=3,
        connections=7,
    )
    assert Safety.from_environment(safety.to_environment()) == safety
    assert Safety.from_environment(Safety().to_environment()) == Safety()
    assert Safety.from_environment(Safety(access_log="-").to_environment()).access_log == "-"
    assert (safety.limits.body_bytes, safety.limits.queue, safety.connection_limits.num) == (
        5,
        3,
        7,
    )


@pytest.mark.parametrize("wrong", [{"queue": 0}, {"deadline_s": -1}, {"idle_timeout_s": 0}])
def test_limits_that_let_nothing_through_are_refused(wrong):
    with pytest.raises(ConfigInvalidError, match=next(iter(wrong))):
        Safety(**wrong)


def refusal(tokens, role, header, route):
    try:
        tokens.check(role, header, route)
    except RequestRefusedError as error:
        return error.status, str(error)
    return 200, ""


def table(tmp_path, text):
    path = tmp_path / "roles.toml"
    path.write_text(text)
    return path


def entry(name, token, roles):
    return (
        f'[[tokens]]\nname = "{name}"\nsha256 = "{sha256(token.encode()).hexdigest()}"\n{roles}\n'
    )


MODEL, INFER = "/v2/models/{name}", "/v2/models/{name}/infer"
ROUTES = {
    "/act": "act",
    INFER: "act",
    MODEL: "act",
    "/episodes": "feedback",
    "/feedback": "feedback",
    "/metrics": "admin",
}


@pytest.mark.parametrize(
    ("roles", "dataset", "routes"),
    [
        ('writer = ["live"]', "live", {"/act", INFER, MODEL, "/episodes"}),
        ('labeler = ["live"]', "live", {"/feedback"}),
        ('reader = ["*"]', "live", {MODEL, "/metrics"}),
        ('operator = ["*"]\nlabeler = ["*"]', "live", {MODEL, "/metrics", "/feedback"}),
        ('writer = ["other"]', "live", set()),
        ('writer = ["other"]', None, {"/act", INFER, MODEL, "/episodes"}),
    ],
)
def test_the_role_table_opens_routes_by_dataset(tmp_path, roles, dataset, routes):
    path = table(tmp_path, entry("one", ONE, roles))
    tokens = read_tokens({}, {"REPLAYLAKE_ACT_TOKEN": OTHER}, roles_file=path, dataset=dataset)
    allowed = set()
    for route, role in ROUTES.items():
        answer, message = refusal(tokens, role, bearer(ONE), route)
        if answer == 200:
            allowed.add(route)
        else:
            assert answer == 403
            assert (f"for dataset {dataset}" in message) == (dataset is not None)
    assert allowed == routes
    assert tokens.roles == {"act", *(ROUTES[route] for route in routes)} - (
        {"feedback"} if "/feedback" not in routes else set()
    )
    tokens.check("act", bearer(OTHER), "/act")
    with pytest.raises(RequestRefusedError, match=r"unknown token; .* or writer in the role table"):
        tokens.check("act", bearer(TWO), "/act")
    assert ONE not in repr(tokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected one or more tables"),
        ("tokens = 3", r"expected one or more tables"),
        ("[[tokens]", "expected TOML"),
        ('[[tokens]]\nname = "a"\nsha256 = "secret-token"\nreader = ["*"]', "64 hex digits"),
        (entry("a", ONE, 'admin = ["*"]'), "found admin, expected the roles reader"),
        (entry("a", ONE, 'reader = "live"'), "expected a list of datasets"),
        (entry("a", ONE, ""), "found no role"),
        (entry("a", ONE, 'reader = ["*"]') + entry("b", ONE, 'writer = ["*"]'), "sha256 of 'a'"),
        (
            entry("a", ONE, 'reader = ["*"]') + entry("a", TWO, 'writer = ["*"]'),
            "name of 'a' twice",
        ),
    ],
)
def test_a_role_table_that_is_none_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigInvalidError, match=message) as caught:
        read_tokens({}, {}, roles_file=table(tmp_path, text))
    assert "secret-token" not in str(caught.value)
    assert caught.value.parameter == "roles_file"


def test_a_role_table_is_tokens_enough_for_other_machines(tmp_path):
    path = table(tmp_path, entry("a", ONE, 'writer = ["*"]'))
    assert check_exposure("0.0.0.0", Safety(roles_file=path)).roles == {"act"}
    safety = Safety(roles_file=path)
    assert Safety.from_environment(safety.to_environment()) == safety
