"""Tasks of test_real_agents.py for the SDKs of Python, one function a package.

Run as `sdk_tasks.py FUNCTION ARGUMENT...` in the environment of that package, beside a module
`configuration` that holds the lines of docs/agents.md. Each task changes hello.py by the model's
tool calls, or by its structured answer, whole and streamed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

TASK = "Change the greeting in hello.py to Bonjour"
FILE = Path("hello.py")
BEFORE, AFTER = 'print("Hello")\n', 'print("Bonjour")\n'


class Report(BaseModel):
    """What was changed."""

    file: str
    greeting: str


class Change(BaseModel):
    """A text of a file to replace."""

    path: str
    old: str
    new: str


class PartialChange(Change):
    """A change by the name that instructor gives it in streams."""


REPORT = Report(file="hello.py", greeting="Bonjour")


def read(path: str) -> str:
    """Returns the text of a file.

    Args:
        path: name of the file
    """
    return Path(path).read_text()


def edit(path: str, old: str, new: str) -> str:
    """Replaces a text of a file.

    Args:
        path: name of the file
        old: text to replace
        new: text to put there
    """
    Path(path).write_text(read(path).replace(old, new))
    return "done"


async def check(*works: Callable[[], Awaitable[Any]]) -> None:
    """Runs tasks on the unchanged file. Each must change the file, and return REPORT or None."""
    for work in works:
        FILE.write_text(BEFORE)
        found = await work()
        assert found in (REPORT, None), found
        assert FILE.read_text() == AFTER


async def openai_agents() -> None:
    from agents import Agent, Runner, function_tool
    from configuration import model

    tools = [function_tool(read), function_tool(edit)]
    agent = Agent(name="editor", model=model, tools=tools, output_type=Report)

    async def whole() -> Any:
        return (await Runner.run(agent, TASK)).final_output

    async def streamed() -> Any:
        result = Runner.run_streamed(agent, TASK)
        kinds = [event.type async for event in result.stream_events()]
        assert kinds.count("raw_response_event") > 9
        return result.final_output

    await check(whole, streamed)


async def langchain(method: str) -> None:
    from configuration import model
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    tools = {"read": tool(read), "edit": tool(edit)}
    caller = model.bind_tools(list(tools.values()))
    reporter = model.with_structured_output(Report, method=method)

    async def turns(answer: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        messages: list[Any] = [HumanMessage(TASK)]
        for name in ("read", "edit"):
            messages.append(await answer(messages))
            (call,) = messages[-1].tool_calls
            assert call["name"] == name
            result = tools[name].invoke(call["args"])
            messages.append(ToolMessage(result, tool_call_id=call["id"]))
        return messages

    async def joined(messages: Any) -> Any:
        first, *more = [chunk async for chunk in caller.astream(messages)]
        assert more
        return sum(more, first)

    async def whole() -> Any:
        return await reporter.ainvoke(await turns(caller.ainvoke))

    async def streamed() -> Any:
        *_, last = [part async for part in reporter.astream(await turns(joined))]
        return last

    await check(whole, streamed)


async def pydantic_ai(output: str) -> None:
    from configuration import model
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput

    kinds = {"tool": ToolOutput, "native": NativeOutput, "prompted": PromptedOutput}
    agent = Agent(model, tools=[read, edit], output_type=kinds[output](Report))

    async def whole() -> Any:
        return (await agent.run(TASK)).output

    async def streamed() -> Any:
        async with agent.run_stream(TASK) as result:
            *_, last = [part async for part in result.stream_output()]
        return last

    await check(whole, streamed)


async def instructor() -> None:
    from configuration import client

    messages = [{"role": "user", "content": TASK}]
    settings: Any = {"model": "local-model", "messages": messages, "max_tokens": 1000}

    async def whole() -> None:
        edit(**client.create(response_model=PartialChange, **settings).model_dump())

    async def streamed() -> None:
        *_, last = client.create_partial(response_model=Change, **settings)
        edit(**last.model_dump())

    await check(whole, streamed)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
