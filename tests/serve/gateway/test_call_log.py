"""The call log without a network: what it writes of any call, in a real lake."""

import hashlib
import itertools
import random
import time
from array import array

import orjson
import pytest

from replaylake.datastore.feedback.call_outcomes import apply_outcomes, ensure_outcomes_table
from replaylake.datastore.feedback.decisions import rewards_encoder
from replaylake.datastore.feedback.journal import Journal
from replaylake.datastore.interchange.formats.generations.messages import derive_group
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.gateway.call_log import CallLog, PassedCall, RecordFailedError
from replaylake.serve.gateway.calls import CallAnswer, CallRequest, Sample
from replaylake.serve.gateway.conversations import CallIdentity

KEY = b"k" * 32
WORKERS = (f"{number:016x}" for number in itertools.count(1))


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


@pytest.fixture
def open_log(lake):
    """Opens call logs of one dataset, each as a process of its own would; closes them."""
    opened = []

    def open_one(**options):
        options = {"idle_s": 3600.0, **options}
        log = CallLog(lake.dataset("agents"), next(WORKERS), KEY, **options)
        opened.append(log)
        return log

    yield open_one
    for log in opened:
        log.close()


def user(text):
    return {"role": "user", "content": text}


def answer(text, number=0, **fields):
    return Sample({"role": "assistant", "content": text}, "stop", **fields)


def call(messages, samples, identity=None, completion_id=None, key=None, **request):
    begun = time.monotonic()
    return PassedCall(
        "openai-chat",
        identity or CallIdentity(),
        CallRequest(messages, **request),
        CallAnswer(samples, completion_id),
        "completed",
        begun,
        begun,
        begun,
        key,
    )


def read(lake, log, columns="*", order="timestamp"):
    log.journal.flush()
    return lake.sql(f"select {columns} from agents.steps order by {order}").to_pylist()


JUNK = (
    None,
    True,
    7,
    2**40,
    2**70,
    -1.5,
    float("nan"),
    "text",
    "half \ud83d of a pair",
    "nul \0",
    {"name": "m"},
    ["a", 1, None],
    [{"type": "text", "text": 5}],
    {"role": 3, "content": {"deep": ["er"]}, "tool_calls": 7},
    [2**31, -1],
)


def test_a_call_that_is_acknowledged_can_be_committed_whatever_it_holds(lake, open_log):
    log = open_log()
    draw = random.Random(0)
    num = 0
    for _ in range(300):
        junk = [draw.choice(JUNK) for _ in range(14)]
        message = {"role": "assistant", "content": junk[0], "tool_calls": junk[1]}
        sample = Sample(
            draw.choice([None, message, {"content": junk[0]}]),
            junk[2],
            draw.choice([None, [1, 2], junk[3]]),
            draw.choice([None, [1, 2], junk[4]]),
            draw.choice([None, [-1.0, -2], [-1e300, 10**400], junk[5]]),
        )
        one = call([{"role": "user", "content": junk[6]}], [sample, sample])
        one.request.model, one.request.tools, one.request.metadata = (
            junk[7],
            junk[8],
            {"m": junk[9]},
        )
        one.request.sampling = {"s": junk[10]}
        one.answer = CallAnswer([sample, sample], junk[11], junk[12], None, junk[13])
        num += log.write(one)
    assert num == 600
    assert len(read(lake, log, "step")) == num
    assert log.journal.num_pending == 0


def test_a_call_that_cannot_be_written_leaves_the_index_as_it_was(open_log):
    log = open_log()
    dialogue = [user("one")]
    log.write(call(dialogue, [answer("ONE")], completion_id="c"))
    log.journal.close()
    before = log.conversations
    dialogue += [{"role": "assistant", "content": "ONE"}, user("two")]
    for _ in range(2):
        with pytest.raises(RecordFailedError, match="the journal is closed"):
            log.write(call(dialogue, [answer("A"), answer("A"), answer("B")], completion_id="d"))
        with pytest.raises(RecordFailedError):
            log.write(call([user("new")], [answer("A"), answer("B")]))
        assert len(before) == 1
        assert before.find_completion("d") is None
        tree = before.find_completion("c").episode
        assert [one.step for one in tree.generations] == [0]
        assert (tree.num_env_steps, list(tree.lasts)) == (1, [""])


def test_calls_written_at_once_are_one_write_and_a_bad_one_does_not_stop_the_others(
    lake, open_log, monkeypatch
):
    log = open_log(redact=refuse_the_secret)
    written = []
    append = log.journal.append
    monkeypatch.setattr(log.journal, "append", lambda records: written.append(append(records)))
    prompt = [user("same")]
    calls = [call(prompt, [answer(text), answer(text)]) for text in ("A", "secret", "B")]
    first, failed, last = log.write_all(calls)
    assert (first, last, len(written)) == (2, 2, 1)
    assert isinstance(failed, RecordFailedError)
    assert "no secrets" in str(failed)
    assert len(log.conversations) == 4
    rows = read(lake, log, "action", "action")
    assert [row["action"] for row in rows] == ["A", "A", "B", "B"]


def refuse_the_secret(one):
    if one["completion"]["content"] == "secret":
        raise ValueError("no secrets")
    return one


def test_calls_that_the_journal_refuses_are_all_undone(open_log):
    log = open_log()
    log.journal.close()
    results = log.write_all([call([user(text)], [answer(text)]) for text in "abc"])
    assert [str(one).partition(": ")[2] for one in results] == ["the journal is closed."] * 3
    assert len(log.conversations) == 0


def test_many_equal_dialogues_cost_as_much_as_others(lake, open_log):
    log = open_log()
    prompt = [user("same")]
    dialogue = [*prompt, {"role": "assistant", "content": "SAME"}, user("next")]

    def measure(num):
        """Return the least time of this thread that a hundred take: another one commits."""
        times = []
        for _ in range(num // 100):
            begun = time.thread_time()
            for _ in range(100):
                log.write(call(prompt, [answer("SAME")]))
                log.write(call(dialogue, [answer("NEXT")]))
            times.append(time.thread_time() - begun)
        return min(times)

    first = measure(500)
    measure(2000)
    assert measure(500) < 3 * first
    log.journal.flush()
    counts = "select count(*) as n from agents.steps group by episode_id"
    assert lake.sql(f"select distinct n from ({counts})").to_pylist() == [{"n": 2}]


def encode(*texts):
    return [ord(letter) for text in texts for letter in text]


def hide_pin(one):
    for message in (*one["messages"], one["completion"]):
        message["content"] = message["content"].replace("4711", "[pin]")
    if one["tools"]:
        one["tools"] = [{"name": "tool"}]
    for name in ("idempotency_key", "source_episode_id"):
        one[name] = None
    return one


def take_turn(log, dialogue, text, **options):
    """Send a turn whose ids spell the whole dialogue; the answer is appended to it."""
    dialogue.append(user(text))
    prompt = encode(*(message["content"] for message in dialogue))
    said = text.upper()
    sample = answer(said, prompt_token_ids=prompt, token_ids=encode(said))
    log.write(call(list(dialogue), [sample], **options))
    dialogue.append({"role": "assistant", "content": said})


def is_told(row, text):
    ids = (row["observation_tokens"] or []) + (row["action_tokens"] or [])
    return text in "".join(map(chr, ids)) or any(text in str(value) for value in row.values())


@pytest.mark.parametrize("change", ["", " "])
def test_what_was_redacted_does_not_come_back_with_a_later_turn(lake, open_log, change):
    log, dialogue = open_log(redact=hide_pin), []
    take_turn(log, dialogue, "hello")
    take_turn(log, dialogue, "pin is 4711")
    dialogue[-1]["content"] += change
    take_turn(log, dialogue, "next")
    log.journal.flush()
    log = open_log(redact=hide_pin)
    take_turn(log, dialogue, "after a restart")
    rows = read(lake, log)
    assert [row["observation"] for row in rows] == [
        "user: hello",
        "user: pin is [pin]",
        "user: next",
        "user: after a restart",
    ]
    assert not any(is_told(row, "4711") for row in rows)
    assert [row["action_tokens"] is None for row in rows] == [False, True, True, True]
    assert [row["is_continuation"] for row in rows] == [None] * 4
    assert lake.sql("select num_turns from agents.sequences").num_rows == 0


def test_tools_that_are_redacted_take_the_ids_with_them(lake, open_log):
    log, dialogue = open_log(redact=hide_pin), []
    take_turn(log, dialogue, "hello")
    take_turn(log, dialogue, "again", tools=[{"name": "tool", "secret": "4711"}])
    rows = read(lake, log)
    assert [row["tools"] for row in rows] == [None, None]
    assert [row["action_tokens"] is None for row in rows] == [False, True]


def test_hashes_cannot_be_tried_without_the_key(lake, open_log):
    log, dialogue = open_log(redact=hide_pin), []
    identity = CallIdentity(episode="of 4711", user="ada")
    take_turn(log, dialogue, "pin is 4711", identity=identity, key="4711")
    take_turn(log, other := [], "pin is 4712")
    first, second = read(lake, log)
    assert not is_told(first, "4711")
    scope = orjson.dumps([None, None, None, "of 4711", "ada"])
    tried = [scope, array("i", encode("pin is 4712", "PIN IS 4712")).tobytes()]
    for text in tried:
        guess = hashlib.blake2b(text, digest_size=12).hexdigest()
        assert guess not in first["context"] + second["context"]
    for row, prompt in ((first, "pin is [pin]"), (second, other[0]["content"])):
        assert row["group_id_source"] == "derived"
        assert row["group_id"] != derive_group([user(prompt)])[0]
    # Samples of one prompt are in one group, also where they were redacted.
    take_turn(log, [], "pin is 4711")
    assert read(lake, log)[2]["group_id"] == first["group_id"]


def find_duplicates(lake):
    keys = "episode_id, agent_id, step"
    text = f"select {keys} from agents.steps group by all having count(*) > 1"
    return lake.sql(text).to_pylist()


def test_no_step_is_written_twice_after_a_restart_that_knows_old_steps(lake, open_log, monkeypatch):
    real, real_ns = time.time, time.time_ns
    log, dialogue = open_log(), []
    take_turn(log, dialogue, "root")
    root = list(dialogue)
    take_turn(log, dialogue, "main")
    for _ in range(2):
        take_turn(log, list(root), "branch")
    log.journal.flush()
    monkeypatch.setattr(time, "time", lambda: real() + 1200)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 1200 * 10**9)
    take_turn(log, dialogue, "recent")
    log.journal.flush()
    log = open_log(idle_s=600)
    take_turn(log, list(root), "branch again")
    take_turn(log, dialogue, "main again")
    rows = read(lake, log)
    assert find_duplicates(lake) == []
    assert len({row["episode_id"] for row in rows}) == 1
    assert [row["env_step"] for row in rows] == list(range(7))
    assert [row["agent_id"] for row in rows[:5]] == ["", "", "~1", "~2", ""]
    (name,) = {row["agent_id"].partition(".")[0] for row in rows[5:]}
    assert name.startswith("~0000")
    assert [(row["parent_agent_id"], row["parent_step"]) for row in rows[5:]] == [("", 0), ("", 2)]
    assert len({row["group_id"] for row in rows}) == 1
    branches = lake.sql("select num_turns from agents.sequences order by 1").to_pylist()
    assert [one["num_turns"] for one in branches] == [2, 2, 2, 4]


def test_two_gateways_that_continue_one_episode_write_no_step_twice(lake, open_log):
    identity = CallIdentity(episode="e")
    first, dialogue = open_log(), []
    take_turn(first, dialogue, "root", identity=identity)
    first.journal.flush()
    second = open_log()
    for log in (first, second):
        own = list(dialogue)
        for text in ("one", "two"):
            take_turn(log, own, text, identity=identity)
        take_turn(log, [], "rewritten", identity=identity)
        sub = CallIdentity(episode="e", agent="helper", parent_agent="")
        take_turn(log, [], "sub", identity=sub)
        log.journal.flush()
    rows = read(lake, first, order="timestamp")
    assert find_duplicates(lake) == []
    assert len(rows) == 9
    assert len({row["episode_id"] for row in rows}) == 1


def test_log_probs_that_are_not_those_of_all_tokens_have_no_sum(lake, open_log):
    log = open_log()
    for usage, told, ids in [
        ({"completion_tokens": 3}, [-0.5], None),
        ({"completion_tokens": 2}, [-0.5, -0.5], None),
        (None, [-0.5], None),
        ({"completion_tokens": 3}, [-0.5], [7]),  # one of several samples: its ids count
    ]:
        sample = answer("x", log_probs=told, token_ids=ids, prompt_token_ids=ids)
        one = call([user("q")], [sample])
        one.answer.usage = usage
        log.write(one)
    rows = read(lake, log, "behavior_log_prob")
    assert [row["behavior_log_prob"] for row in rows] == [None, -1.0, -0.5, -0.5]


def test_the_answer_id_of_several_samples_names_the_first(lake, open_log):
    log = open_log()
    log.write(call([user("q")], [answer(text) for text in "abc"], completion_id="several"))
    ensure_outcomes_table(log.dataset)
    rows = read(lake, log, "episode_id, sample_index, action", "sample_index")
    assert [row["action"] for row in rows] == ["a", "b", "c"]
    found = log.conversations.find_completion("several")
    assert found.episode.episode_id == rows[0]["episode_id"]
    report = {"decision_id": "several", "mode": "last", "reward": 1.0, "timestamp": log.clock.now()}
    report |= {"terminated": True, "truncated": False}
    encoder = rewards_encoder(log.dataset)
    journal = Journal(log.dataset.rewards, encoder, worker=next(WORKERS))
    journal.append([orjson.dumps(report)])
    journal.close()
    apply_outcomes(log.dataset)
    rows = read(lake, log, "reward, terminated", "sample_index")
    assert [row["reward"] for row in rows] == [1.0, None, None]
    assert open_log().conversations.find_completion("several") is None  # its episode has ended


def test_a_context_of_its_own_below_a_redacted_step_has_ids(lake, open_log):
    log = open_log(redact=hide_pin)
    log_in = CallIdentity(episode="e")
    take_turn(log, [], "pin is 4711", identity=log_in)
    sub = CallIdentity(episode="e", agent="helper", parent_agent="")
    take_turn(log, [], "no secret", identity=sub)
    # Redacted names do not keep a restarted gateway from finding the episode.
    log.journal.flush()
    log = open_log(redact=hide_pin)
    take_turn(log, [], "rewritten", identity=log_in)
    rows = read(lake, log)
    assert [row["action_tokens"] is None for row in rows] == [True, False, False]
    assert [row["is_continuation"] for row in rows] == [None, False, False]
    assert len({row["episode_id"] for row in rows}) == 1
