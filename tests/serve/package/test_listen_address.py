"""A Bento listens where other machines reach it only with tokens, whoever says where."""

import os
import signal
import socket
import subprocess
import sys

import click
import pytest

from replaylake.datastore.errors import ConfigInvalidError, ServeError
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.package.bento import package_bento
from replaylake.serve.package.listen_address import resolve_address

TOKEN = {"REPLAYLAKE_ACT_TOKEN": "a-token-of-some-length"}


def checked(environment, **options):
    """Return the address, as where BentoML's command with these options imports the Bento."""
    with click.Context(click.Command("serve")) as context:
        context.params.update(options)
        return resolve_address(environment)


def test_what_the_command_is_told_goes_before_what_the_bento_is_told(monkeypatch):
    assert resolve_address({}) == checked({}, host=None) == "127.0.0.1"
    assert checked({"REPLAYLAKE_SERVE_HOST": ""}) == "127.0.0.1"
    for refused in (
        lambda: resolve_address({"REPLAYLAKE_SERVE_HOST": "0.0.0.0"}),
        lambda: checked({}, host="0.0.0.0"),
        lambda: checked({}, host="::"),
    ):
        with pytest.raises(ConfigInvalidError, match="which other machines can reach"):
            refused()
    assert checked({"REPLAYLAKE_SERVE_INSECURE": "1"}, host="0.0.0.0") == "127.0.0.1"
    assert checked({"REPLAYLAKE_SERVE_HOST": "0.0.0.0"}, host="127.0.0.1") == "0.0.0.0"
    with pytest.raises(ServeError, match=r"nowhere\.invalid"):
        checked({"REPLAYLAKE_SERVE_HOST": "nowhere.invalid"})
    monkeypatch.setenv(*next(iter(TOKEN.items())))
    assert checked({}, host="0.0.0.0") == "127.0.0.1"


@pytest.mark.parametrize(("bound", "refused"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_worker_goes_by_its_socket(bound, refused):
    with socket.socket() as listener:
        listener.bind((bound, 0))
        if refused:
            with pytest.raises(ConfigInvalidError, match=r"host: found 0\.0\.0\.0"):
                checked({}, fd=listener.fileno())
        else:
            # As where BentoML was told of a narrower address than the Bento.
            environment = {"REPLAYLAKE_SERVE_HOST": "0.0.0.0"}
            assert checked(environment, fd=listener.fileno()) == "0.0.0.0"
        listener.listen()  # it is open still


@pytest.mark.slow
def test_bentoml_does_not_start_where_others_reach_it(package, tmp_path, kit):
    lake = open_lake(tmp_path / "lake", create=True)
    ref = lake.registry.register("by_hand", package, run_id="run", lineage={})
    package_bento(ref, tmp_path / "bento")
    for arguments, variables in (
        (["--host", "0.0.0.0"], {}),
        ([], {"BENTOML_HOST": "0.0.0.0"}),
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "bentoml", "serve", tmp_path / "bento", *arguments],
            env={
                **os.environ,
                "BENTOML_HOME": str(tmp_path / "home"),
                "REPLAYLAKE_SERVE_PORT": str(port),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
        assert process.returncode != 0, arguments
        assert "found 0.0.0.0, which other machines can reach" in said, (arguments, variables)
