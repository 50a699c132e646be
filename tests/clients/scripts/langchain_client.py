"""LangChain's `ChatOpenAI`: chat completions and responses, `bind_tools`, structured output, streamed."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from playing import KEY, URL, play, weather_in
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return weather_in(city)


def model(responses):
    return ChatOpenAI(model="scripted", base_url=f"{URL}/v1", api_key=KEY, use_responses_api=responses)


def asking(responses, streamed=False):
    def ask(prompt):
        bound = model(responses).bind_tools([weather])
        messages = [HumanMessage(prompt)]
        while True:
            if streamed:
                answer = None
                for piece in bound.stream(messages):
                    answer = piece if answer is None else answer + piece
            else:
                answer = bound.invoke(messages)
            if not answer.tool_calls:
                return answer.text if isinstance(answer.text, str) else answer.text()
            messages.append(answer)
            messages += [
                ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
            ]

    return ask


def structured(responses, method="json_schema"):
    return lambda prompt: model(responses).with_structured_output(Person, method=method).invoke(prompt).model_dump()


if __name__ == "__main__":
    play(
        "langchain-openai",
        plain__chat=asking(False),
        plain__responses=asking(True),
        client__chat=asking(False),
        client__responses=asking(True),
        client__chat_streamed=asking(False, True),
        client__responses_streamed=asking(True, True),
        server__chat=asking(False),
        server__responses=asking(True),
        server__chat_streamed=asking(False, True),
        server__responses_streamed=asking(True, True),
        both__chat=asking(False),
        both__responses=asking(True),
        both__chat_streamed=asking(False, True),
        both__responses_streamed=asking(True, True),
        json__chat=structured(False),
        json__responses=structured(True),
        json__chat_by_tool=structured(False, "function_calling"),
    )
