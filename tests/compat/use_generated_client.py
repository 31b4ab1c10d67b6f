"""A client generated from /docs.json by openapi-python-client, used against a real server.

python tests/compat/use_generated_client.py BIN: the `bin` of an environment that has it.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LOG = _ROOT / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"
_USE = """
    import importlib, json, sys
    sys.path.insert(0, sys.argv[1])
    package, url = sys.argv[2], sys.argv[3]
    client = importlib.import_module(package).Client(base_url=url)
    models = importlib.import_module(f"{package}.models")

    def call(operation, **options):
        module = importlib.import_module(f"{package}.api.default.{operation}")
        return module.sync_detailed(client=client, **options)

    # A batch and a report are mappings: what is required of them depends on the fields they have.
    def check(response, status):
        assert response.status_code == status, (response.status_code, response.content)
        return response.parsed

    observation = [0.0, 0.1, 0.02, -0.1]
    one = models.ActOne(observation=observation, episode_id="visit-1", step=0)
    acted = check(call("act", body=one), 200)
    assert acted.action in (0, 1) and acted.version == 1, acted
    report = {"decision_id": acted.decision_id, "reward": 1.0, "terminated": True}
    check(call("feedback", body=report), 200)
    batch = check(call("act", body={"observations": [observation] * 3}), 200)
    assert len(batch.actions) == 3, batch

    decision = models.Decision(
        request_id="elsewhere-1", observation=observation, action=1, policy="other",
        version=7, age_s=1.5, log_prob=-0.5,
    )
    body = models.DecisionsJsonBody(decisions=[decision])
    (decision_id,) = check(call("decisions", body=body), 200).decision_ids
    report = {"decision_id": decision_id, "reward": 2.0, "terminated": True}
    check(call("feedback", body=report), 200)

    episode = models.Episode.from_dict({
        "episode_id": "robot-7", "observations": [observation] * 2, "actions": [0, 1],
        "rewards": [0.0, 1.0], "terminated": True, "final_observation": observation,
    })
    taken = check(call("episodes", body=models.EpisodesJsonBody(episodes=[episode])), 202)
    assert (taken.episodes, taken.steps) == (1, 2), taken

    wrong = models.ActOne(observation=[1.0])
    refused = check(call("act", body=wrong), 422)
    assert refused.error.field == "observation", refused
    unknown = {"decision_id": "d1", "reward": 1.0}
    assert check(call("feedback", body=unknown), 404).error.field == "decision_id"

    assert check(call("policy"), 200).additional_properties["policy"] == "clone"
    assert check(call("alive"), 200).alive is True
    assert check(call("ready"), 200).ready is True
    assert "replaylake_requests_total" in call("metrics").content.decode()
    assert check(call("document"), 200)["openapi"].startswith("3.1")

    assert call("open_inference_server").status_code == 200
    name = models.OpenInferenceModelName.CLONE
    assert call("open_inference_model", name=name).status_code == 200
    tensor = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": observation}
    request = models.InferenceRequest.from_dict({"inputs": [tensor]})
    name = models.OpenInferenceInferName.CLONE
    answer = call("open_inference_infer", name=name, body=request)
    assert answer.status_code == 200, answer.content
    print(json.dumps({"decision_id": acted.decision_id}))
"""


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "REPLAYLAKE_LAKE": f"{home}/lake"}
        ours = str(Path(sys.executable).with_name("replaylake"))

        def run(*words: str) -> None:
            ran = subprocess.run([ours, *words], env=environment, capture_output=True, text=True)
            if ran.returncode:
                sys.exit(ran.stderr)

        run("ingest", str(_LOG), "--dataset", "cartpole")
        run(*"train offline cartpole --algorithm bc --policy clone --updates 20".split())  # noqa: SIM905
        command = [ours, "serve", "clone", "--log-to", "served", "--port", "0"]
        server = subprocess.Popen(
            [*command, "--server", "uvicorn", "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            _check(folder, url, Path(home), run)
        finally:
            server.terminate()
            server.wait(30)


def _check(folder: str, url: str, home: Path, run: object) -> None:
    with urllib.request.urlopen(f"{url}/docs.json") as answer:
        document = json.load(answer)
    (home / "docs.json").write_text(json.dumps(document))
    generator = str(Path(folder) / "openapi-python-client")
    words = ["generate", "--path", str(home / "docs.json"), "--output-path", str(home / "client")]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    ran = subprocess.run([generator, *words], capture_output=True, text=True, env=environment)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    # Bodies in msgpack and .npy are beside JSON, which has everything.
    left = [line for line in said.splitlines() if "Could not" in line or "Unable to" in line]
    assert not left, said
    (package,) = (path.parent for path in (home / "client").glob("*/client.py"))
    made = {path.stem for path in (package / "api" / "default").glob("*.py")} - {"__init__"}
    operations = {
        one["operationId"] for path in document["paths"].values() for one in path.values()
    }
    assert made == operations, made ^ operations
    command = [str(Path(folder) / "python"), "-c", textwrap.dedent(_USE), str(home / "client")]
    ran = subprocess.run([*command, package.name, url], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(ran.stderr)
    version = subprocess.run([generator, "--version"], capture_output=True, text=True).stdout
    print(f"{version.strip()}: all {len(made)} operations generated, all calls as expected")


if __name__ == "__main__":
    main(sys.argv[1])
