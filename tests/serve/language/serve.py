"""The server of a language policy with the engine of these tests: LAKE POLICY CANARY..."""

import functools
import os
import sys
from pathlib import Path

from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.gateway import server as gateway_server
from replaylake.serve.gateway.config import GatewayConfig
from replaylake.serve.language.server import LanguageServeConfig, run_language_server
from replaylake.serve.recording import outcome_log

# Calls and rewards are committed at once, as tests would wait for them.
gateway_server.JournalConfig = functools.partial(
    gateway_server.JournalConfig, flush_interval_s=0.05
)
outcome_log._APPLY_S = 0.02


def command(policy, descriptor):
    launch = [sys.executable, "-m", "replaylake.serve.processes.launch"]
    return [*launch, "engine", policy, str(descriptor)]


os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # of engine.py
lake, policy, *canary = sys.argv[1:]
ref = open_lake(lake).registry.resolve(policy)
config = LanguageServeConfig(
    GatewayConfig("", lake, "agents", port=0, engine="vllm"),
    policy,
    ref.name,
    ref.version,
    command,
    canary=tuple(canary),
    follow_s=0.02,
)
sys.exit(run_language_server(config))
