"""A taskset of verifiers, played by a scripted model and recorded: see .ci/compat-verifiers.

python tests/compat/rollout_verifiers.py FOLDER
"""

import json
import sys
from pathlib import Path

import replaylake as rl
from replaylake.datastore.errors import NotFoundError

TASKSET = """
import verifiers.v1 as vf


class ReverseTask(vf.Task):
    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.prompt[::-1])


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        for word in ("ab", "cd", "ee"):
            yield ReverseTask(vf.TaskData(id=word, prompt=word), self.config.task)


__all__ = ["ReverseTaskset"]
"""


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    (folder / "reverse_of_tests.py").write_text(TASKSET)
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(folder), str(tests / "online" / "environments")]
    from replaylake_scripted import Scripted

    def reply(messages):
        word = messages[-1]["content"]
        return word if word == "cd" else word[::-1]

    lake = rl.open(folder / "lake", create=True)
    config = rl.LanguageRolloutConfig(
        env="verifiers:reverse_of_tests", samples=2, producer="run", seed=0, concurrency=3
    )
    receipt = rl.rollout_language(lake, "words", Scripted(reply), config)
    assert (receipt.num_rollouts, receipt.num_failed) == (6, 0), receipt
    rows = lake.sql("select * from words.steps order by episode_id").to_pylist()
    assert [row["episode_id"] for row in rows] == [f"run/{t}-{s}" for t in range(3) for s in (0, 1)]
    assert [row["reward"] for row in rows] == [2.0, 2.0, 0.0, 0.0, 2.0, 2.0]
    assert [json.loads(row["metadata"])["task_id"] for row in rows] == [
        *("ab", "ab", "cd", "cd", "ee", "ee")
    ]
    assert {row["observation"] for row in rows} == {"user: ab", "user: cd", "user: ee"}
    assert rows[0]["action_tokens"] == [*b"ba"]
    (component,) = rows[0]["reward_components"]
    assert component == {"name": "exact", "score": 1.0, "weight": 2.0}, component
    again = rl.rollout_language(lake, "words", Scripted(reply), config)
    assert (again.num_rollouts, again.num_recorded_before) == (0, 6)
    try:
        other = rl.LanguageRolloutConfig(env="verifiers:absent_of_tests")
        rl.rollout_language(lake, "words", Scripted(reply), other)
    except NotFoundError as error:
        assert "absent_of_tests" in str(error)  # noqa: PT017 - no pytest in this environment
    else:
        raise AssertionError
    print("passed: verifiers, 6 rollouts of 3 tasks")


if __name__ == "__main__":
    main()
