"""Functions that a gateway's `--redact` names."""


def hide_numbers(call):
    for message in (*call["messages"], call["completion"]):
        message["content"] = message["content"].replace("4711", "[number]")
    if call["messages"][-1]["content"] == "drop this":
        return None
    if call["messages"][-1]["content"] == "fail here":
        raise ValueError("cannot redact")
    return call
