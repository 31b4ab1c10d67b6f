"""A local model behind messages: its ids, log-probs and calls, as a batch and alone."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from replaylake.datastore.errors import ConfigInvalidError, GenerationError
from replaylake.offline.language.chat_tokenizer import _parse_calls
from replaylake.offline.language.local_model import LocalModel

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(text):
    return {"role": "user", "content": text}


def generate(folder, *requests, **options):
    """Return the generations of requests that are made at the same time."""

    async def main():
        model = LocalModel(folder, **options)
        try:
            calls = [model.generate(messages, **given) for messages, given in requests]
            return await asyncio.gather(*calls)
        finally:
            model.close()

    return asyncio.run(main())


def encode(words, text):
    ids, at = [], 0
    while at < len(text):
        word = next(w for w in sorted(words, key=len, reverse=True) if text.startswith(w, at))
        ids.append(words.index(word))
        at += len(word)
    return ids


def test_the_prompt_is_the_template_and_the_log_probs_are_the_models(chat_model_folder, words):
    (one,) = generate(chat_model_folder, ([user("1+2=")], {"seed": 3}), policy_version=4)
    assert list(one.prompt_ids) == encode(words, "[u]1+2=[end][a]")
    assert (one.policy, one.policy_version) == (chat_model_folder.name, 4)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(chat_model_folder)
    with torch.no_grad():
        ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
        scores = model(ids).logits[0].log_softmax(-1)
    first = len(one.prompt_ids) - 1
    expected = [scores[first + i, token].item() for i, token in enumerate(one.completion_ids)]
    assert one.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_seed_gives_the_same_reply_alone_and_in_a_batch(chat_model_folder):
    requests = [([user(f"{n}+{n}=")], {"seed": n, "sampling": {"max_tokens": 8}}) for n in range(9)]
    together = generate(chat_model_folder, *requests)
    small = generate(chat_model_folder, *requests, max_batch_size=2)
    alone = [generate(chat_model_folder, one)[0] for one in requests[:3]]
    ids = [one.completion_ids for one in together]
    assert [one.completion_ids for one in small] == ids
    assert [one.completion_ids for one in alone] == ids[:3]
    assert len({tuple(one) for one in ids}) > 1


def test_a_reply_goes_on_from_the_sampled_ids(chat_model_folder, words):
    messages = [user("1+2=")]
    (first,) = generate(chat_model_folder, (messages, {"seed": 1, "sampling": {"max_tokens": 4}}))
    messages += [first.message, {"role": "tool", "content": "3"}]
    previous = {"previous": first, "num_previous": 2, "seed": 2}
    (second,) = generate(chat_model_folder, (messages, previous))
    before = [*first.prompt_ids, *first.completion_ids]
    ends = first.completion_ids[-1] == words.index("[end]")
    after = encode(words, f"{'' if ends else '[end]'}[t]3[end][a]")
    assert list(second.prompt_ids) == [*before, *after]


def test_a_stop_token_is_not_repeated_by_the_template(chat_model_folder, words):
    def reply(seed):
        (one,) = generate(chat_model_folder, ([user("1")], {"seed": seed}))
        return one

    one = next(one for one in map(reply, range(50)) if one.finish_reason == "stop")
    assert one.completion_ids[-1] == words.index("[end]")
    messages = [user("1"), one.message, user("2")]
    (after,) = generate(chat_model_folder, (messages, {"previous": one, "num_previous": 2}))
    ids = encode(words, "[u]2[end][a]")
    assert list(after.prompt_ids) == [*one.prompt_ids, *one.completion_ids, *ids]


def test_without_a_template_the_texts_are_continued(plain_model_folder, words):
    messages = [user("1+2=")]
    (one,) = generate(plain_model_folder, (messages, {}))
    assert list(one.prompt_ids) == encode(words, "1+2=")
    messages += [one.message, user("+1=")]
    (two,) = generate(plain_model_folder, (messages, {"previous": one, "num_previous": 2}))
    assert list(two.prompt_ids) == [*one.prompt_ids, *one.completion_ids, *encode(words, "+1=")]
    with pytest.raises(ConfigInvalidError, match="no chat template") as error:
        generate(plain_model_folder, (messages, {"tools": TOOLS}))
    assert error.value.parameter == "tools"


def test_calls_of_tools_are_read_and_rendered(chat_model_folder, words):
    text = 'so <tool_call>\n{"name": "add", "arguments": {"n": 12}}\n</tool_call>'
    message = _parse_calls(text)
    (call,) = message["tool_calls"]
    assert (message["content"], call["function"]["name"]) == ("so", "add")
    assert json.loads(call["function"]["arguments"]) == {"n": 12}
    history = [user("1"), {**message, "content": "1"}, {"role": "tool", "content": "2"}]
    (one,) = generate(chat_model_folder, (history, {"tools": TOOLS}))
    assert list(one.prompt_ids) == encode(words, "[u]1[end][a]1(12)[end][t]2[end][a]")
    for malformed in ("<tool_call>{n}</tool_call>", '<tool_call>{"a": 1}</tool_call>', "12"):
        assert _parse_calls(malformed) == {"role": "assistant", "content": malformed}


def test_the_context_bounds_prompt_and_reply(chat_model_folder):
    (one,) = generate(
        chat_model_folder, ([user("1" * 59)], {"sampling": {"max_tokens": 100}, "seed": 5})
    )
    assert len(one.prompt_ids) + len(one.completion_ids) <= 64
    with pytest.raises(GenerationError, match="a prompt of 73 tokens, expected 1 to 63"):
        generate(chat_model_folder, ([user("1" * 70)], {}))


@pytest.mark.parametrize(
    ("sampling", "found"),
    [
        ({"top_p": 0.9}, "found top_p, expected temperature or max_tokens"),
        ({"temperature": -1}, "temperature: found -1"),
        ({"max_tokens": 0}, "max_tokens: found 0"),
        ({"max_tokens": "many"}, "max_tokens: found 'many'"),
    ],
)
def test_other_parameters_of_sampling_are_refused(chat_model_folder, sampling, found):
    with pytest.raises(ConfigInvalidError, match=found) as error:
        generate(chat_model_folder, ([user("1")], {"sampling": sampling}))
    assert error.value.parameter == "sampling"


def test_a_template_that_refuses_messages_is_named(make_model_folder):
    folder = make_model_folder("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(GenerationError, match=r"template refuses them .*roles must alternate"):
        generate(folder, ([user("1")], {}))
