"""A small engine for language models: OpenAI's API, one generation at a time."""
