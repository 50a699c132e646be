"""litellm, as a client of an OpenAI-compatible endpoint."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from playing import KEY, URL, play, weather_in

litellm.telemetry = False
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}


def asking(streamed=False):
    def ask(prompt):
        messages = [{"role": "user", "content": prompt}]
        while True:
            done = litellm.completion(
                model="openai/scripted",
                api_base=f"{URL}/v1",
                api_key=KEY,
                messages=messages,
                tools=[TOOL],
                stream=streamed,
            )
            if streamed:
                done = litellm.stream_chunk_builder(list(done), messages=messages)
            message = done.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = weather_in(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return ask


if __name__ == "__main__":
    play(
        "litellm",
        plain__chat=asking(),
        client__chat=asking(),
        client__chat_streamed=asking(True),
        server__chat=asking(),
        server__chat_streamed=asking(True),
        both__chat=asking(),
        both__chat_streamed=asking(True),
    )
