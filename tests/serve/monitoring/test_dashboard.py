"""A server with feedback exposes every metric of its dashboard and of the alerts that ship."""

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.running.train import TrainConfig, train

_GRAFANA = Path(__file__).parents[3] / "docs" / "grafana"


def _expressions():
    dashboard = json.loads((_GRAFANA / "serving.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    alerts = yaml.safe_load((_GRAFANA / "serving-alerts.yml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def _scrape(client):
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.slow
def test_a_server_exposes_what_panels_and_alerts_name(kit, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lines = [
        f"{20 + i},{('ios', 'web')[i % 2]},{('hat', 'scarf')[i % 2]},{i % 2}" for i in range(8)
    ]
    (tmp_path / "log.csv").write_text("\n".join(["age,device,item,click", *lines]) + "\n")
    mapping = {"observation": "age,device", "action": "item", "reward": "click"}
    options = ReadOptions(mapping=mapping)
    ingest(lake, [tmp_path / "log.csv"], "shop", format="bandit", options=options)
    config = TrainConfig(
        algorithm="bc", policy="clone", updates=3, batch_size=4, options={"hidden_sizes": [4]}
    )
    ref = train(lake, ["shop"], config).policy
    server = kit.start_server(
        package=ref.path,
        policy="clone",
        version=ref.version,
        reference="clone@champion",
        lake=lake.path,
        log_to="live",
        join_every_s=0.5,
    )
    try:
        with httpx.Client(base_url=server.url) as client:
            for age in range(20, 30):
                observation = {"age": age, "device": "ios"}
                chosen = client.post("/act", json={"observation": observation}).json()
                report = {"decision_id": chosen["decision_id"], "reward": 1, "terminated": True}
                assert client.post("/feedback", json=report).status_code == 200
            kit.wait_until(lambda: _scrape(client).get("replaylake_joined_ratio") == 1)
            exposed = set(_scrape(client))
    finally:
        server.stop()
    named = set(re.findall(r"replaylake_\w+", " ".join(_expressions())))
    assert named - exposed == set()
