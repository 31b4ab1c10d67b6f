"""The profile of a server: of a real one that answers, with and without tokens."""

import httpx
import pytest

from replaylake.cli.main import main
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.monitoring.server_profile import measure_server
from replaylake.serve.safety.limits import Safety
from replaylake.serve.transport import RequestFailedError, ServerUnreachableError

NUM_REQUESTS = 500


@pytest.mark.slow
def test_a_server_accounts_for_its_time(kit, tmp_path, capsys):
    lake = open_lake(tmp_path / "lake", create=True)
    for role in ("act", "admin"):
        (tmp_path / role).write_text(f"a-long-secret-token-of-{role}\n")
    server = kit.start_server(
        package=kit.save_policy(tmp_path / "package"),
        policy="clone",
        version=1,
        lake=lake.path,
        log_to="live",
        server="uvicorn",
        safety=Safety(act_token_file=tmp_path / "act", admin_token_file=tmp_path / "admin"),
    )
    try:
        headers = {"Authorization": "Bearer a-long-secret-token-of-act"}
        with httpx.Client(base_url=server.url, headers=headers) as client:
            for _ in range(NUM_REQUESTS):
                body = {"observation": [0.1, 0.2, 0.3, 0.4]}
                assert client.post("/act", json=body).status_code == 200
        found = measure_server(server.url, token="a-long-secret-token-of-admin")
        with pytest.raises(RequestFailedError, match="HTTP 401"):
            measure_server(server.url)
        arguments = ["runs", "profile", server.url, "--token-file", str(tmp_path / "admin")]
        assert main(arguments) == 0
    finally:
        server.stop()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"server {server.url}  ")
    assert {"receive", "send", "idle", "other"} <= {line.split()[0] for line in lines[2:]}
    links = {one.link: one for one in found.links if one.place == "process"}
    # Each request is two packets, head and body, or one; other requests came with them.
    assert links["receive"].items >= NUM_REQUESTS
    # One in 16 is measured: that none is has a chance of 1e-14.
    for link in ("check", "parse", "inference", "journal", "respond", "send"):
        assert links[link].seconds > 0, link
        assert links[link].items % 16 == 0, link
    assert links["idle"].seconds > 0
    assert sum(one.share for one in found.links if one.place == "process") >= 0.999


def test_what_is_no_server_is_named():
    with pytest.raises(ServerUnreachableError, match="no response"):
        measure_server("http://127.0.0.1:9")
    with pytest.raises(ConfigInvalidError, match="expected a URL"):
        measure_server("ftp://somewhere")
