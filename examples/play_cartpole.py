"""Plays CartPole against a server, as an application would: one request for each decision.

    python examples/play_cartpole.py http://localhost:3000 --episodes 40 --max-steps 15

Each decision is one POST /act, each reward one POST /feedback. Needs gymnasium and numpy.
"""

from __future__ import annotations

import argparse

import gymnasium

from replaylake.serve.client import Client


def play(client: Client, env: gymnasium.Env[object, int], episode_id: str, seed: int) -> int:
    """Play one episode; return its number of steps."""
    observation, _ = env.reset(seed=seed)
    ended, step = False, 0
    while not ended:
        decision = client.act(observation, episode_id=episode_id, step=step)
        observation, reward, terminated, truncated, _ = env.step(int(decision.action))
        ended = terminated or truncated
        client.feedback(
            float(reward),
            decision_id=decision.decision_id,
            terminated=terminated,
            truncated=truncated,
            final_observation=observation if ended else None,
        )
        step += 1
    return step


def main() -> None:
    """Play the episodes and print how many steps they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0, help="of the first episode")
    options = parser.parse_args()
    env = gymnasium.make("CartPole-v1", max_episode_steps=options.max_steps)
    seeds = range(options.first_seed, options.first_seed + options.episodes)
    with Client(options.url) as client:
        num_steps = sum(play(client, env, f"game-{seed}", seed) for seed in seeds)
    print(f"{options.episodes} episodes, {num_steps} steps")


if __name__ == "__main__":
    main()
