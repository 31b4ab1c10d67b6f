"""An agent that knows nothing of ReplayLake: where its calls go is in OPENAI_BASE_URL."""

from typing import Any

import openai

client = openai.OpenAI()
messages: list[Any] = []
for question in ("hello", "what is new?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model="capitals", messages=messages)
    messages.append(answer.choices[0].message)
    print(answer.choices[0].message.content)
