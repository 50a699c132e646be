"""The `anthropic` package on `/v1/messages`: streamed and whole, with twenty rounds of tools that alternate between the two sides."""

from anthropic import Anthropic
from playing import KEY, URL, calls, play, weather_in

client = Anthropic(base_url=URL, api_key=KEY)
WEATHER = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
STEP = {
    "name": "step",
    "description": "One step",
    "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


def use(block):
    if block.name == "weather":
        return weather_in(**block.input)
    calls.append(block.name)
    return f"step {block.input['number']}"


def asking(streamed):
    def ask(prompt):
        messages = [{"role": "user", "content": prompt}]
        while True:
            request = {"model": "scripted", "max_tokens": 1000, "messages": messages, "tools": [WEATHER, STEP]}
            if streamed:
                with client.messages.stream(**request) as stream:
                    for _ in stream:
                        pass
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**request)
            if answer.stop_reason != "tool_use":
                return "".join(block.text for block in answer.content if block.type == "text")
            messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": use(block)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})

    return ask


def count(prompt):
    return (
        client.messages.count_tokens(model="scripted", messages=[{"role": "user", "content": prompt}]).input_tokens > 0
    )


if __name__ == "__main__":
    play(
        "anthropic",
        plain__messages=asking(False),
        plain__messages_streamed=asking(True),
        client__messages=asking(False),
        client__messages_streamed=asking(True),
        server__messages=asking(False),
        server__messages_streamed=asking(True),
        both__messages=asking(False),
        both__messages_streamed=asking(True),
        rounds__messages_streamed=asking(True),
        tokens__messages=count,
    )
