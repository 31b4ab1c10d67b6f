"""A run's metrics over HTTP, as Prometheus reads them."""

from __future__ import annotations

import socket
import threading
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.runs.timings import LINKS, Timings
from replaylake.online.monitoring.prometheus import MetricsServer


def timings() -> Timings:
    """Each link for as many seconds as its place in the list, from 1."""
    found = Timings("trainer")
    for number, link in enumerate(LINKS, 1):
        found.add(link, float(number), 10 * number, 100 * number)
    return found


# What a run logs: its own metrics, its links', and those of its learner.
VALUES = {
    "env_steps": 12_000.0,
    "episodes": 80.0,
    "return": 187.5,
    "staleness": 1.25,
    "samples_per_insert": 31.5,
    "updates_per_s": 900.0,
    "steps_per_s": 2500.0,
    "latency_ms": 125.0,
    "evaluation/return": 480.0,
    "selection/environment": 475.0,
    "critic_loss": 0.5,
    "q_mean": 12.0,
    **timings().to_metrics(),
}
RUN = {"run_id": "01aa", "policy": "pole", "env": "CartPole-v1"}


def scraped(server: MetricsServer) -> dict[tuple[str, str], tuple[str, float]]:
    """Return by (sample, the label beside the run's own) the kind and the value."""
    with urllib.request.urlopen(server.url, timeout=60) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert {name: labels.pop(name) for name in RUN} == RUN
            found[sample.name, " ".join(labels.values())] = (family.type, sample.value)
    return found


@pytest.fixture
def server():
    with MetricsServer(0) as server:
        yield server


def test_it_is_on_loopback_at_a_free_port_and_silent_until_the_run_begins(
    server: MetricsServer,
) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    assert server.port > 0
    server.set(1, {"return": 1.0})
    assert scraped(server) == {}


def test_every_metric_of_a_run(server: MetricsServer) -> None:
    server.begin("01aa", policy="pole", env="CartPole-v1")
    server.set(11_000, VALUES)
    found = scraped(server)
    (_, since_s) = found.pop(("replaylake_run_last_metrics_timestamp_seconds", ""))
    assert since_s > 1.7e9
    links = {key: value for key, value in found.items() if "_link_" in key[0]}
    assert {key: value for key, value in found.items() if key not in links} == {
        ("replaylake_run_updates_total", ""): ("counter", 11_000),
        ("replaylake_run_env_steps_total", ""): ("counter", 12_000),
        ("replaylake_run_episodes_total", ""): ("counter", 80),
        ("replaylake_run_return", ""): ("gauge", 187.5),
        ("replaylake_run_staleness_versions", ""): ("gauge", 1.25),
        ("replaylake_run_samples_per_insert", ""): ("gauge", 31.5),
        ("replaylake_run_updates_per_second", ""): ("gauge", 900),
        ("replaylake_run_env_steps_per_second", ""): ("gauge", 2500),
        ("replaylake_run_latency_seconds", ""): ("gauge", 0.125),
        ("replaylake_run_selection_environment", ""): ("gauge", 475),
        ("replaylake_run_metric", "evaluation/return"): ("gauge", 480),
        ("replaylake_run_metric", "critic_loss"): ("gauge", 0.5),
        ("replaylake_run_metric", "q_mean"): ("gauge", 12),
    }
    expected = {}
    for number, link in enumerate(LINKS, 1):
        expected["replaylake_run_link_seconds_total", f"{link} trainer"] = ("counter", number)
        expected["replaylake_run_link_items_total", f"{link} trainer"] = ("counter", 10 * number)
        expected["replaylake_run_link_bytes_total", f"{link} trainer"] = ("counter", 100 * number)
    assert links == expected


def test_the_newest_values_count_and_the_others_stay(server: MetricsServer) -> None:
    server.begin("01aa", policy="pole", env="CartPole-v1")
    server.set(100, {"return": 1.0, "critic_loss": 0.5})
    server.set(300, {"return": float("nan"), "env_steps": 900.0})
    # Measured at the end, of the update whose policy was best.
    server.set(200, {"evaluation/return": 7.0})
    found = scraped(server)
    assert found["replaylake_run_updates_total", ""] == ("counter", 300)
    assert str(found["replaylake_run_return", ""][1]) == "nan"
    assert found["replaylake_run_metric", "critic_loss"] == ("gauge", 0.5)
    assert found["replaylake_run_metric", "evaluation/return"] == ("gauge", 7)


def test_names_that_prometheus_would_not_take_are_labels() -> None:
    with MetricsServer(0) as server:
        server.begin("01aa", policy="pole", env="CartPole-v1")
        server.set(1, {'odd "name"\n': 1.0, "profile/nothing": 2.0, "profile//seconds": 3.0})
        found = scraped(server)
    others = {label for name, label in found if name == "replaylake_run_metric"}
    assert others == {'odd "name"\n', "profile/nothing", "profile//seconds"}


def test_a_port_in_use_is_refused_at_once(server: MetricsServer) -> None:
    with pytest.raises(
        ConfigInvalidError, match=f"127.0.0.1:{server.port}: Address already in use"
    ):
        MetricsServer(server.port)


@pytest.mark.parametrize(("port", "host"), [(70_000, "127.0.0.1"), (0, "192.0.2.1")])
def test_an_address_that_is_not_here(port: int, host: str) -> None:
    with pytest.raises(
        ConfigInvalidError, match="expected a free port on an address of this machine"
    ):
        MetricsServer(port, host)


def test_closed_it_leaves_no_thread_and_a_free_port(held_port: int) -> None:
    before = set(threading.enumerate())
    server = MetricsServer(held_port)
    server.begin("01aa", policy="pole", env="CartPole-v1")
    server.set(1, VALUES)
    # A client that says nothing keeps nobody waiting.
    with socket.create_connection((server.host, server.port)):
        server.close()
        server.close()
    assert {one for one in threading.enumerate() if not one.daemon} <= before
    with MetricsServer(server.port) as again:
        assert again.port == server.port


@pytest.mark.slow
def test_it_is_read_while_it_is_written(server: MetricsServer) -> None:
    server.begin("01aa", policy="pole", env="CartPole-v1")
    done = threading.Event()

    def write() -> None:
        update = 0
        while not done.is_set():
            update += 1
            server.set(update, {**VALUES, f"metric_{update % 100}": 1.0, "env_steps": 3.0 * update})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            found = scraped(server)
            if found:
                steps = found["replaylake_run_env_steps_total", ""][1]
                assert steps == 3 * found["replaylake_run_updates_total", ""][1]
    finally:
        done.set()
        writer.join()
