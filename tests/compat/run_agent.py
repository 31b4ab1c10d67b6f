"""Agents of two libraries, each with a tool that asks a sub-agent; neither knows of a gateway.

python run_agent.py openai-agents|pydantic-ai

Run in an environment of these libraries, with OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import asyncio
import sys


async def run_openai_agents():
    from agents import (
        Agent,
        Runner,
        function_tool,
        set_default_openai_api,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    helper = Agent(name="helper", instructions="Find things.", model="tiny")

    @function_tool
    async def look(word: str) -> str:
        """Look for a word."""
        return (await Runner.run(helper, "find it")).final_output

    planner = Agent(name="planner", instructions="Plan.", tools=[look], model="tiny")
    return (await Runner.run(planner, "use the tool")).final_output


async def run_pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    model = OpenAIChatModel("tiny")
    helper = Agent(model, instructions="Find things.")
    planner = Agent(model, instructions="Plan.")

    @planner.tool_plain
    async def look(word: str) -> str:
        """Look for a word."""
        return (await helper.run("find it")).output

    return (await planner.run("use the tool")).output


RUN = {"openai-agents": run_openai_agents, "pydantic-ai": run_pydantic_ai}

if __name__ == "__main__":
    print(asyncio.run(RUN[sys.argv[1]]()))
