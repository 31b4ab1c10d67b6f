"""Who acts: policies as a person names them, for an environment's one agent or for each of its."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from replaylake.datastore.errors import ConfigInvalid
from replaylake.datastore.lake.lake import Lake
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any
from replaylake.online.collecting.acting import RANDOM, Acting, AgentsActing
from replaylake.online.collecting.worker import RolloutConfig


def who_acts(
    lake: Lake,
    policy: str,
    agent_policies: Mapping[str, str],
    config: RolloutConfig,
    exploring: Mapping[str, Any],
) -> AgentsActing:
    """Return who acts: one for all, or for each agent the one named for it or else `policy`.

    exploring: of all, as Acting has it. Raises: NotFound, NameRefused; ConfigInvalid for policies
    by agent where there is only one.
    """
    everyone = replace(_resolved(lake, policy), **exploring)
    if not agent_policies:
        return everyone
    env = make_any(config.env_id, config.env_args)
    env.close()
    if not isinstance(env, Game):
        raise ConfigInvalid(
            f"{config.env_id}: found policies for {', '.join(agent_policies)}, expected one "
            "policy: it is an environment of one agent."
        )
    own = {a: replace(_resolved(lake, text), **exploring) for a, text in agent_policies.items()}
    return dict.fromkeys(env.agents, everyone) | own


def named(acting: AgentsActing) -> dict[str, Any]:
    """Return the policy's name and version, as receipts and records say it."""
    if isinstance(acting, Acting):
        return {"policy": acting.name, "policy_version": acting.version}
    texts = [f"{agent}={one.name}:{one.version}" for agent, one in acting.items()]
    return {"policy": ", ".join(texts), "policy_version": None}


def _resolved(lake: Lake, policy: str) -> Acting:
    if policy == RANDOM:
        return Acting()
    ref = lake.registry.resolve(policy)
    return Acting(ref.name, ref.version, ref.path, manifest_sha256=ref.manifest_sha256)
