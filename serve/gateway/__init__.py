"""Gateway: calls of language models passed on to an engine, each recorded as a step."""
