"""The OpenAI Agents SDK: both kinds of model, tools on either side, both in one answer, a handoff, streamed."""

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from playing import KEY, URL, play, weather_in

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return weather_in(city)


def model(kind):
    return kind(model="scripted", openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))


def asking(kind, streamed=False):
    async def ask(prompt):
        agent = Agent(name="first", instructions="Answer.", model=model(kind), tools=[weather])
        if not streamed:
            return (await Runner.run(agent, prompt)).final_output
        result = Runner.run_streamed(agent, prompt)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return ask


def handing_over(kind):
    async def ask(prompt):
        refunds = Agent(name="refunds", instructions="You are the refunds desk.", model=model(kind))
        first = Agent(name="first", instructions="Hand over.", model=model(kind), handoffs=[refunds])
        result = await Runner.run(first, prompt)
        assert result.last_agent is refunds, result.last_agent.name
        return result.final_output

    return ask


if __name__ == "__main__":
    chat, responses = OpenAIChatCompletionsModel, OpenAIResponsesModel
    play(
        "openai-agents",
        plain__chat=asking(chat),
        plain__responses=asking(responses),
        client__chat=asking(chat),
        client__responses=asking(responses),
        client__chat_streamed=asking(chat, True),
        client__responses_streamed=asking(responses, True),
        server__chat=asking(chat),
        server__responses=asking(responses),
        server__chat_streamed=asking(chat, True),
        server__responses_streamed=asking(responses, True),
        both__chat=asking(chat),
        both__responses=asking(responses),
        both__chat_streamed=asking(chat, True),
        both__responses_streamed=asking(responses, True),
        handoff__chat=handing_over(chat),
        handoff__responses=handing_over(responses),
    )
