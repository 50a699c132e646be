"""instructor: objects by a tool and by a JSON schema."""

import instructor
from openai import OpenAI
from playing import KEY, URL, play
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def asking(mode):
    def ask(prompt):
        client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)
        return client.chat.completions.create(
            model="scripted", response_model=Person, messages=[{"role": "user", "content": prompt}]
        ).model_dump()

    return ask


if __name__ == "__main__":
    play(
        "instructor",
        json__chat_by_tool=asking(instructor.Mode.TOOLS),
        json__chat_by_schema=asking(instructor.Mode.JSON_SCHEMA),
    )
