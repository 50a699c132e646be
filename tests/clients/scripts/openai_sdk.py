"""The `openai` package: chat completions and responses, with tools on either side, streamed and whole."""

import json

from openai import OpenAI
from playing import KEY, URL, play, weather_in
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS},
}
TOOL = {"type": "function", "name": "weather", "description": "The weather", "parameters": PARAMETERS, "strict": True}


class Person(BaseModel):
    name: str
    age: int


def chat(prompt, tools=(CHAT_TOOL,)):
    messages = [{"role": "user", "content": prompt}]
    while True:
        more = {"tools": list(tools)} if tools else {}
        message = client.chat.completions.create(model="scripted", messages=messages, **more).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.to_dict())
        for call in message.tool_calls:
            result = weather_in(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def streamed_chat(prompt):
    messages = [{"role": "user", "content": prompt}]
    while True:
        with client.chat.completions.stream(model="scripted", messages=messages, tools=[CHAT_TOOL]) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                    for call in message.tool_calls
                ],
            }
        )
        for call in message.tool_calls:
            result = weather_in(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(prompt):
    given, previous = prompt, None
    while True:
        answer = client.responses.create(model="scripted", input=given, tools=[TOOL], previous_response_id=previous)
        if answer.status == "failed":
            raise RuntimeError(answer.error.message)
        wanted = [item for item in answer.output if item.type == "function_call"]
        if not wanted:
            return answer.output_text
        previous = answer.id
        given = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": weather_in(**json.loads(item.arguments)),
            }
            for item in wanted
        ]


def streamed_responses(prompt):
    given, previous = prompt, None
    while True:
        more = {"previous_response_id": previous} if previous else {}
        with client.responses.stream(model="scripted", input=given, tools=[TOOL], **more) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_response()
        if answer.status == "failed":
            raise RuntimeError(answer.error.message)
        wanted = [item for item in answer.output if item.type == "function_call"]
        if not wanted:
            return answer.output_text
        previous = answer.id
        given = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": weather_in(**json.loads(item.arguments)),
            }
            for item in wanted
        ]


def chat_object(prompt):
    done = client.chat.completions.parse(
        model="scripted", messages=[{"role": "user", "content": prompt}], response_format=Person
    )
    return done.choices[0].message.parsed.model_dump()


def response_object(prompt):
    return client.responses.parse(model="scripted", input=prompt, text_format=Person).output_parsed.model_dump()


if __name__ == "__main__":
    play(
        "openai",
        plain__chat=lambda prompt: chat(prompt, ()),
        client__chat=chat,
        client__chat_streamed=streamed_chat,
        client__responses=responses,
        client__responses_streamed=streamed_responses,
        server__chat=chat,
        server__chat_streamed=streamed_chat,
        server__responses=responses,
        server__responses_streamed=streamed_responses,
        both__chat=chat,
        both__chat_streamed=streamed_chat,
        both__responses=responses,
        both__responses_streamed=streamed_responses,
        json__chat=chat_object,
        json__responses=response_object,
        fail__chat=chat,
        fail__chat_streamed=streamed_chat,
        fail__responses=responses,
    )
