"""pydantic-ai: both kinds of model, tools on either side, an object as the result, streamed."""

from playing import KEY, URL, play, weather_in
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


def model(kind):
    return kind("scripted", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))


def asking(kind, streamed=False):
    async def ask(prompt):
        agent = Agent(model(kind))

        @agent.tool_plain
        def weather(city: str) -> str:
            """The weather in a city."""
            return weather_in(city)

        if not streamed:
            return (await agent.run(prompt)).output
        async with agent.run_stream(prompt) as result:
            return await result.get_output()

    return ask


def structured(kind):
    async def ask(prompt):
        return (await Agent(model(kind), output_type=Person).run(prompt)).output.model_dump()

    return ask


if __name__ == "__main__":
    chat, responses = OpenAIChatModel, OpenAIResponsesModel
    play(
        "pydantic-ai-slim",
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
        json__chat=structured(chat),
        json__responses=structured(responses),
    )
