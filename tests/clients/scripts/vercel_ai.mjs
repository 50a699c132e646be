// The Vercel AI SDK with both providers: text with tools, whole and streamed, and an object.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, URL, play, weatherIn } from "./playing.mjs";

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const compatible = createOpenAICompatible({ name: "hermes", baseURL: `${URL}/v1`, apiKey: KEY, supportsStructuredOutputs: true });
const models = {
  chat: openai.chat("scripted"),
  responses: openai.responses("scripted"),
  compatible: compatible("scripted"),
};
const tools = {
  weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => weatherIn(city),
  }),
};

const text = (model) => async (prompt) => (await generateText({ model, prompt, tools, stopWhen: stepCountIs(5) })).text;
const streamed = (model) => async (prompt) => {
  let failure;
  const result = streamText({ model, prompt, tools, stopWhen: stepCountIs(5), onError: ({ error }) => { failure = error; } });
  await result.consumeStream();
  if (failure) throw failure;
  return await result.text;
};
const schema = z.object({ name: z.string(), age: z.number() });
const object = (model) => async (prompt) => (await generateObject({ model, prompt, schema })).object;
const output = (model) => async (prompt) => (await generateText({ model, prompt, output: Output.object({ schema }) })).output;

const scenarios = {};
for (const [name, model] of Object.entries(models)) {
  for (const kind of ["plain", "client", "server", "both"]) {
    scenarios[`${kind}__${name}`] = text(model);
    scenarios[`${kind}__${name}_streamed`] = streamed(model);
  }
  scenarios[`json__${name}`] = object(model);
  scenarios[`json__${name}_output`] = output(model);
}
await play("ai", scenarios);
