// The `openai` package for Node: chat completions and responses, with tools on either side, streamed and whole.
import OpenAI from "openai";
import { KEY, URL, play, weatherIn } from "./playing.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const chatTool = { type: "function", function: { name: "weather", description: "The weather", parameters } };
const tool = { type: "function", name: "weather", description: "The weather", parameters, strict: true };

const chat = (streamed) => async (prompt) => {
  const messages = [{ role: "user", content: prompt }];
  for (;;) {
    const request = { model: "scripted", messages, tools: [chatTool] };
    const done = streamed
      ? await client.chat.completions.stream(request).finalChatCompletion()
      : await client.chat.completions.create(request);
    const message = done.choices[0].message;
    if (!message.tool_calls?.length) return message.content;
    messages.push({ role: "assistant", content: message.content, tool_calls: message.tool_calls });
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: weatherIn(JSON.parse(call.function.arguments).city) });
  }
};

const responses = (streamed) => async (prompt) => {
  let input = prompt;
  let previous;
  for (;;) {
    const request = { model: "scripted", input, tools: [tool], ...(previous ? { previous_response_id: previous } : {}) };
    const answer = streamed ? await client.responses.stream(request).finalResponse() : await client.responses.create(request);
    if (answer.status === "failed") throw new Error(answer.error.message);
    const wanted = answer.output.filter((item) => item.type === "function_call");
    if (!wanted.length) return answer.output_text;
    previous = answer.id;
    input = wanted.map((item) => ({
      type: "function_call_output",
      call_id: item.call_id,
      output: weatherIn(JSON.parse(item.arguments).city),
    }));
  }
};

await play("openai", {
  plain__chat: chat(false),
  client__chat: chat(false), client__chat_streamed: chat(true), client__responses: responses(false), client__responses_streamed: responses(true),
  server__chat: chat(false), server__chat_streamed: chat(true), server__responses: responses(false), server__responses_streamed: responses(true),
  both__chat: chat(false), both__chat_streamed: chat(true), both__responses: responses(false), both__responses_streamed: responses(true),
  fail__chat: chat(false), fail__responses: responses(false),
});
