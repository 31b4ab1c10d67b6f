"""A language model that replies what a test says; for this process and children."""

from replaylake.datastore.interchange.rollout_rows import Generation


class Scripted:
    """A model whose reply is a function of the messages; it keeps what it was called with."""

    def __init__(self, reply, **described) -> None:
        self.reply, self.calls, self.is_closed = reply, [], False
        self.described = {"policy": "scripted", **described}

    def describe(self):
        return self.described

    async def generate(self, messages, **given):
        self.calls.append({"messages": list(messages), **given})
        reply = self.reply(messages)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Generation):
            return reply
        previous = given["previous"]
        before = [] if previous is None else [*previous.prompt_ids, *previous.completion_ids]
        new = messages[given["num_previous"] :]
        prompt_ids = [*before, *(ord(c) for one in new for c in one["content"])]
        ids = [ord(letter) for letter in reply]
        return Generation(
            {"role": "assistant", "content": reply},
            "stop",
            prompt_ids,
            ids,
            [-0.5] * len(ids),
            policy="scripted",
            policy_version=3,
            num_prompt_tokens=len(prompt_ids),
            num_completion_tokens=len(ids),
        )

    def close(self):
        self.is_closed = True
