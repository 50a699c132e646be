"""Simon Willison's `llm`, with a model of its `extra-openai-models.yaml`."""

import os
import pathlib
import tempfile

from playing import KEY, LEDGERS, URL, play, weather_in

folder = pathlib.Path(tempfile.mkdtemp(dir=LEDGERS))
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: hermes\n  model_name: scripted\n  api_base: {URL}/v1\n  api_key_name: hermes\n  supports_tools: true\n  supports_schema: true\n"
)

import llm
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def weather(city: str) -> str:
    """The weather in a city."""
    return weather_in(city)


def asking(stream):
    return lambda prompt: llm.get_model("hermes").chain(prompt, tools=[weather], key=KEY, stream=stream).text()


def structured(prompt):
    import json

    return json.loads(llm.get_model("hermes").prompt(prompt, schema=Person, key=KEY, stream=False).text())


if __name__ == "__main__":
    play(
        "llm",
        plain__chat=asking(False),
        client__chat=asking(False),
        client__chat_streamed=asking(True),
        server__chat=asking(False),
        server__chat_streamed=asking(True),
        both__chat=asking(False),
        json__chat=structured,
    )
