"""Which step a call goes on from: by names, by the dialogue, and after a restart."""

import gc

import pytest

from replaylake.datastore.feedback.recorded_calls import RecentCall
from replaylake.serve.gateway.conversations import (
    CallIdentity,
    Conversations,
    Generation,
    hash_answer,
    hash_contexts,
)

KEY = b"k" * 32
NOBODY = CallIdentity()


class Recorder:
    """Records calls as a gateway does; `place` is where the last one was put."""

    def __init__(self, idle_s=100.0):
        self.index = Conversations(idle_s, KEY, "w")
        self.now_s = 0.0
        self.calls = []

    def call(self, messages, answer="yes", identity=NOBODY, **options):
        hashes, hasher = hash_contexts(messages, KEY)
        place = self.index.place(identity, hashes, self.now_s, **options)
        context = hash_answer(hasher, said(answer))
        env_step = place.episode.num_env_steps
        completion_id = f"c{len(self.calls)}"
        self.index.add(place, context, self.now_s, completion_id=completion_id)
        tree = place.episode
        self.calls.append(
            RecentCall(
                tree.episode_id,
                place.agent,
                place.step,
                env_step,
                tree.source_episode_id,
                completion_id,
                f"{tree.scope}:{context}:-1:-",
                int(self.now_s * 1e6),
                False,
            )
        )
        return place


def asked(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_a_call_goes_on_from_the_longest_dialogue_that_was_recorded():
    recorder = Recorder()
    first = recorder.call([asked("a")], "b")
    second = recorder.call([asked("a"), said("b"), asked("c")], "d")
    third = recorder.call([asked("a"), said("b"), asked("c"), said("d"), asked("e")])
    assert (first.step, second.step, third.step) == (0, 1, 2)
    assert (first.num_known, second.num_known, third.num_known) == (0, 2, 4)
    assert first.episode is second.episode is third.episode
    assert second.is_next
    assert not second.is_rewritten


@pytest.mark.parametrize(
    "history",
    [
        said("b"),
        said(" b\n"),
        said([{"type": "text", "text": "b"}]),
        {**said("b"), "refusal": None, "tool_calls": None, "reasoning_content": "hm"},
        said([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]),
    ],
)
def test_clients_may_write_an_answer_in_another_form(history):
    recorder = Recorder()
    recorder.call([asked("a")], "b")
    assert recorder.call([asked("a"), history, asked("c")]).step == 1


def test_calls_of_tools_are_compared_by_name_and_arguments():
    recorder = Recorder()
    call = {"function": {"name": "look", "arguments": '{"x": 1, "y": [2]}'}, "id": "1"}
    same = {"function": {"name": "look", "arguments": '{"y":[2],"x":1}'}, "id": "other"}
    hashes, hasher = hash_contexts([asked("a")], KEY)
    place = recorder.index.place(NOBODY, hashes, 0)
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    recorder.index.add(place, hash_answer(hasher, answer), 0)
    again = {"role": "assistant", "content": "", "tool_calls": [same]}
    assert recorder.call([asked("a"), again, asked("b")]).step == 1
    other = {"function": {"name": "look", "arguments": '{"x": 2}'}}
    again = {"role": "assistant", "content": "", "tool_calls": [other]}
    assert recorder.call([asked("a"), again, asked("b")]).step == 0


def test_another_user_run_or_key_is_another_dialogue():
    recorder = Recorder()
    history = [asked("a"), said("yes"), asked("b")]
    for identity in (NOBODY, CallIdentity(user="ada"), CallIdentity(run="r"), CallIdentity("r", 1)):
        assert recorder.call([asked("a")], identity=identity).step == 0
        assert recorder.call(history, identity=identity).step == 1
    assert len({call.episode_id for call in recorder.calls}) == 4
    assert hash_contexts(history, KEY)[0] != hash_contexts(history, b"x" * 32)[0]


def test_equal_dialogues_go_on_one_by_one():
    recorder = Recorder()
    first, second = (recorder.call([asked("a")]) for _ in range(2))
    assert first.episode is not second.episode
    history = [asked("a"), said("yes"), asked("b")]
    found = [recorder.call(history).episode for _ in range(2)]
    assert found == [first.episode, second.episode]
    # Now both have gone on: a third is a branch of the newest.
    third = recorder.call(history)
    assert (third.episode, third.agent, third.step) == (second.episode, "~1", 0)


def test_an_edited_history_goes_on_from_the_part_that_is_as_it_was():
    recorder = Recorder()
    recorder.call([asked("a")], "b")
    recorder.call([asked("a"), said("b"), asked("c")], "d")
    edited = [asked("a"), said("b"), asked("c"), said("other"), asked("e")]
    place = recorder.call(edited)
    assert (place.agent, place.step, place.num_known) == ("~1", 0, 2)
    assert (place.parent.agent, place.parent.step) == ("", 0)


def test_agents_of_a_named_episode_have_steps_of_their_own():
    recorder = Recorder()
    main = CallIdentity(episode="e")
    helper = CallIdentity(episode="e", agent="helper", parent_agent="")
    recorder.call([asked("a")], "b", main)
    first = recorder.call([asked("sub")], "s", helper)
    second = recorder.call([asked("sub"), said("s"), asked("more")], "t", helper)
    assert (first.agent, first.step, first.parent.step) == ("helper", 0, 0)
    assert (second.agent, second.step, second.is_next) == ("helper", 1, True)
    rewritten = recorder.call([asked("summary")], "u", helper)
    assert (rewritten.agent, rewritten.step, rewritten.is_rewritten) == ("helper~1", 0, True)
    assert recorder.call([asked("a"), said("b"), asked("c")], "d", main).step == 1
    assert len({call.episode_id for call in recorder.calls}) == 1
    keys = [(call.agent_id, call.step) for call in recorder.calls]
    assert len(set(keys)) == len(keys)


def test_an_episode_is_closed_after_its_time_or_its_end():
    recorder = Recorder(idle_s=10)
    identity = CallIdentity(episode="e")
    first = recorder.call([asked("a")], identity=identity)
    recorder.now_s = 9
    assert recorder.call([asked("a"), said("yes"), asked("b")], identity=identity).step == 1
    recorder.now_s = 20
    later = recorder.call([asked("a"), said("yes"), asked("b")], identity=identity)
    assert later.step == 0
    assert later.episode.episode_id != first.episode.episode_id
    assert later.episode.source_episode_id == "e"
    recorder.index.close_episode(later.episode)
    assert len(recorder.index) == 0
    assert recorder.index.find_episode("e") is None
    assert recorder.call([asked("x")], identity=identity).step == 0


def test_the_index_is_made_again_from_what_was_recorded():
    before = Recorder()
    before.call([asked("a")], "b")
    before.call([asked("a"), said("b"), asked("c")], "d")
    before.call([asked("x")], identity=CallIdentity(episode="e"))
    after = Recorder()
    after.index.restore(sorted(before.calls, key=lambda one: (one.episode_id, one.env_step)), 1)
    assert after.index.find_completion("c1").step == 1
    history = [asked("a"), said("b"), asked("c"), said("d"), asked("e")]
    place = after.call(history, "f")
    # In an agent of this process: the other one may still be there.
    assert (place.episode.episode_id, place.agent, place.step) == (
        before.calls[0].episode_id,
        "~w",
        0,
    )
    assert (place.parent.agent, place.parent.step, place.is_rewritten) == ("", 1, False)
    assert after.calls[0].env_step == 2
    assert after.call([*history, said("f"), asked("g")]).step == 1
    assert after.call(history).agent == "~w.1"
    named = after.call([asked("y")], identity=CallIdentity(episode="e"))
    assert (named.episode.episode_id, named.agent) == (before.calls[2].episode_id, "~w")
    ended = Recorder()
    ended.index.restore([before.calls[0]._replace(ends=True), before.calls[1]], 1)
    assert len(ended.index) == 0


def test_an_answer_is_gone_on_from_by_its_id():
    recorder = Recorder()
    recorder.call([asked("a")])
    place = recorder.call([asked("b")], previous="c0")
    assert (place.step, place.num_known, place.is_next) == (1, 0, True)
    other = recorder.call([asked("b")], previous="c0", identity=CallIdentity(user="eve"))
    assert other.step == 0
    assert other.episode is not place.episode


def test_of_two_open_episodes_of_one_name_the_newest_is_continued():
    identity = CallIdentity(episode="e")
    recorders = [Recorder(), Recorder()]  # two gateways, each with an episode of its own
    for number, recorder in enumerate(recorders):
        recorder.now_s = number
        recorder.call([asked("a")], "b", identity)
    after = Recorder()
    calls = [one for recorder in recorders for one in recorder.calls]
    after.index.restore(sorted(calls, key=lambda one: one.episode_id), 1)
    place = after.call([asked("a"), said("b"), asked("c")], "d", identity)
    assert place.episode.episode_id == recorders[1].calls[0].episode_id
    assert (place.parent.step, place.is_rewritten, place.num_known) == (0, False, 2)


def test_an_episode_that_is_removed_leaves_nothing_to_a_garbage_collection():
    def count():
        return sum(isinstance(one, Generation) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = count()
        index = Conversations(10.0, KEY, "w")
        for number in range(20):
            hashes, hasher = hash_contexts([asked("a")] + [said("b")] * (number % 3), KEY)
            place = index.place(NOBODY, hashes, 0.0)
            index.add(place, hash_answer(hasher, said("b")), 0.0)
        del place
        assert count() == before + 20
        index.expire(11.0)
        assert count() == before
    finally:
        gc.enable()
