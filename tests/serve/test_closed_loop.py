"""The loop closed: serve, play over HTTP, report, join, evaluate off-policy, learn, be better."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest
from replaylake.offline.running.train import TrainConfig, train
from replaylake.serve.client import Client

EPISODES, TOGETHER = 200, 25
BALANCING = np.array([0.1, 0.3, 2.0, 1.0], np.float32)


def weights(sharpness):
    """Return those of a policy that pushes where the pole falls, surely so as it is sharper."""
    return sharpness * np.stack([-BALANCING / 2, BALANCING / 2], axis=1)


class Player:
    """Plays episodes side by side through one client, and reports through two."""

    def __init__(self, acting, reporting):
        self._acting, self._reporting = acting, reporting
        self._rng = np.random.default_rng(0)
        self._held_back = []  # reports that are made after everything was joined once
        self.returns = {}

    def play(self, first):
        environments = [gymnasium.make("CartPole-v1") for _ in range(TOGETHER)]
        names = [f"episode-{first + i}" for i in range(TOGETHER)]
        seen = [env.reset(seed=first + i)[0] for i, env in enumerate(environments)]
        playing, step = list(range(TOGETHER)), 0
        self.returns |= dict.fromkeys(names, 0.0)
        while playing:
            chosen = self._acting.act_batch(
                np.stack([seen[i] for i in playing]),
                episode_ids=[names[i] for i in playing],
                steps=[step] * len(playing),
                seed=1000 * first + step,
            )
            assert np.isfinite(chosen.log_probs).all()
            reports, still = [], []
            rows = zip(playing, chosen.actions, chosen.decision_ids, strict=True)
            for i, action, decision_id in rows:
                seen[i], reward, terminated, truncated, _ = environments[i].step(int(action))
                self.returns[names[i]] += reward
                report = {"reward": reward, "terminated": terminated, "truncated": truncated}
                if truncated:
                    report["final_observation"] = seen[i]
                if self._rng.random() < 0.5:
                    report["decision_id"] = decision_id
                else:
                    report |= {"episode_id": names[i], "step": step}
                reports.append(report)
                if not terminated and not truncated:
                    still.append(i)
            self._report(reports)
            playing, step = still, step + 1

    def _report(self, reports):
        now = []
        for report in reports:
            drawn = self._rng.random()
            if drawn < 0.02:
                self._held_back.append(report)
                continue
            now.append({**report, "reward": 0.0} if drawn < 0.03 else report)
            if drawn < 0.03:
                self._held_back.append(report)  # the right one comes later
        if not now:
            return
        one = self._acting if self._rng.random() < 0.5 else self._reporting
        one.feedback_batch(now)
        if self._rng.random() < 0.1:
            self._reporting.feedback_batch(now)  # once more, over another connection

    def report_the_rest(self):
        assert len(self._held_back) > 100
        for report in self._held_back:
            self._reporting.feedback(**report)


def simulated(policy, num, **how):
    """Return what a policy makes of `num` episodes."""
    rng = np.random.default_rng(7)
    environments = [gymnasium.make("CartPole-v1") for _ in range(num)]
    seen = np.stack([env.reset(seed=10_000 + i)[0] for i, env in enumerate(environments)])
    returns, playing = np.zeros(num), list(range(num))
    while playing:
        actions = policy.act(seen[playing], rng=rng, **how).actions
        ended = set()
        for i, action in zip(playing, actions, strict=True):
            seen[i], reward, terminated, truncated, _ = environments[i].step(int(action))
            returns[i] += reward
            if terminated or truncated:
                ended.add(i)
        playing = [i for i in playing if i not in ended]
    return returns


@pytest.mark.slow
def test_what_is_served_is_learned_from(kit, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    folders = {
        name: kit.save_policy(
            tmp_path / name, graph=kit.linear_graph(weights(sharpness), "logits", 4)
        )
        for name, sharpness in (("served", 1.0), ("sharper", 1.2))
    }
    registered = {
        name: lake.registry.register(name, folder, run_id=name, lineage={})
        for name, folder in folders.items()
    }
    running = kit.start_server(
        package=registered["served"].path,
        policy="served",
        version=1,
        lake=lake.path,
        log_to="live",
        explore="temperature=1",
        workers=2,
    )
    with Client(running.url) as acting, Client(running.url) as reporting:
        player = Player(acting, reporting)
        for first in range(0, EPISODES, TOGETHER):
            player.play(first)
            if first == EPISODES // 2 // TOGETHER * TOGETHER:
                join_feedback(lake, "live")  # beside the server
        kit.wait_until(
            lambda: join_feedback(lake, "live").decisions == sum(player.returns.values())
        )
        player.report_the_rest()
    running.stop()
    receipt = join_feedback(lake, "live")
    assert (receipt.waiting, receipt.orphaned, receipt.unrewarded) == (0, 0, 0), receipt

    # SQL finds every episode, every step once, with its log-probability.
    rows = lake.sql(
        "select source_episode_id as name, num_steps, return, complete from live.episodes"
    ).to_pylist()
    assert len(rows) == EPISODES
    assert {row["name"]: row["return"] for row in rows} == player.returns
    assert all(row["complete"] and row["num_steps"] == row["return"] for row in rows)
    (counts,) = lake.sql(
        "select count(*) as num, count(distinct (episode_id, step)) as steps, "
        "count(distinct decision_id) as decisions, count(behavior_log_prob) as known, "
        "max(behavior_log_prob) as highest, sum(reward) as total from live.steps"
    ).to_pylist()
    total = sum(player.returns.values())
    assert counts["num"] == counts["steps"] == counts["decisions"] == counts["known"] == total
    assert counts["total"] == total
    assert counts["highest"] < 0

    # What the log says of another policy is what that policy does.
    question = EvaluationRequest(
        "live",
        "sharper",
        exploration=Exploration(temperature=1.0),
        estimators=("wis", "pdis", "wpdis"),
        unseen=True,
    )
    report = evaluate_policy(lake, question)
    measured = simulated(load_policy(folders["sharper"]), 400, deterministic=False)
    assert measured.mean() > np.mean(list(player.returns.values()))
    for one in report.estimates.estimates:
        assert one.ci_low <= measured.mean() <= one.ci_high, (one, measured.mean())

    # And what is learned from it is better than what was served.
    config = TrainConfig(algorithm="bc", updates=300, threads=1, options={"hidden_sizes": [32]})
    learned = train(lake, ["live"], replace(config, policy="learned")).policy
    returns = simulated(load_policy(learned.path), 50)
    assert returns.mean() > np.mean(list(player.returns.values()))
