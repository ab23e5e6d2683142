// The official JavaScript client against the server; one JSON object a line for each case.
//   node client.mjs SERVER MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";

const [server, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${server}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["c", "f"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "get_weather", description: "The weather.", strict: true, parameters } };
const now = { type: "function", function: { name: "now", parameters: { type: "object", properties: {} } } };
const named = { type: "function", function: { name: "get_weather" } };
const place = {
  type: "object",
  properties: { country: { enum: ["France", "Spain"] }, coastal: { type: "boolean" } },
  required: ["country", "coastal"],
  additionalProperties: false,
};
const form = { type: "json_schema", json_schema: { name: "place", strict: true, schema: place } };
const common = { model, messages, temperature: 0 };
const ask = (options) => client.chat.completions.create({ ...common, ...options });

function checkWeather(calls) {
  assert.equal(calls.length, 1);
  assert.ok(calls[0].id);
  assert.equal(calls[0].function.name, "get_weather");
  assert.deepEqual(Object.keys(JSON.parse(calls[0].function.arguments)).sort(), ["city", "unit"]);
}

const cases = {
  async models() {
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    assert.deepEqual(ids, [model]);
  },
  async chat() {
    const answer = await ask({ max_tokens: 20 });
    assert.match(answer.choices[0].message.content, /Paris/);
  },
  async chat_stream() {
    const whole = await ask({ max_tokens: 20 });
    let text = "";
    let usage;
    for await (const chunk of await ask({ max_tokens: 20, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async chat_stream_helper() {
    const runner = client.chat.completions.stream({ ...common, max_tokens: 20 });
    const content = await runner.finalContent();
    assert.match(content, /Paris/);
  },
  async completions() {
    const options = { model, prompt: "The sea is", temperature: 0, max_tokens: 8 };
    const whole = await client.completions.create(options);
    let text = "";
    for await (const chunk of await client.completions.create({ ...options, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
  },
  async tools_auto() {
    const { message } = (await ask({ tools: [weather, now], tool_choice: "auto", max_tokens: 40 })).choices[0];
    assert.ok(message.content !== null || message.tool_calls.length > 0);
  },
  async tools_named() {
    const choice = (await ask({ tools: [weather, now], tool_choice: named, max_tokens: 200 })).choices[0];
    assert.equal(choice.finish_reason, "tool_calls");
    checkWeather(choice.message.tool_calls);
  },
  async tools_required() {
    const options = { tools: [weather], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
    checkWeather((await ask(options)).choices[0].message.tool_calls);
  },
  async tools_stream() {
    for (const tool_choice of [named, "required"]) {
      const options = { tools: [weather], tool_choice, parallel_tool_calls: false, max_tokens: 200 };
      const final = await client.chat.completions.stream({ ...common, ...options }).finalChatCompletion();
      assert.equal(final.choices[0].finish_reason, "tool_calls");
      checkWeather(final.choices[0].message.tool_calls);
    }
  },
  async tool_history() {
    const { message } = (await ask({ tools: [weather], tool_choice: named, max_tokens: 200 })).choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    const answer = await ask({ messages: [...messages, message, result], tools: [weather], max_tokens: 5 });
    assert.equal(answer.choices.length, 1);
  },
  async run_tools() {
    const called = [];
    const tool = { type: "function", function: { ...weather.function, parse: JSON.parse, function: (given) => called.push(given) && "sunny" } };
    const runner = client.chat.completions.runTools(
      { ...common, tools: [tool], tool_choice: named, max_tokens: 200 },
      { maxChatCompletions: 1 },
    );
    await runner.done();
    assert.equal(called.length, 1);
  },
  async structured_output() {
    const answer = await ask({ response_format: form, max_tokens: 100 });
    assert.ok("country" in JSON.parse(answer.choices[0].message.content));
  },
  async structured_output_parse() {
    const answer = await client.chat.completions.parse({ ...common, response_format: form, max_tokens: 100 });
    assert.equal(typeof answer.choices[0].message.parsed.coastal, "boolean");
  },
  async structured_output_stream() {
    const final = await client.chat.completions.stream({ ...common, response_format: form, max_tokens: 100 }).finalChatCompletion();
    assert.equal(typeof JSON.parse(final.choices[0].message.content).coastal, "boolean");
  },
  async errors() {
    await assert.rejects(ask({ temperature: -1 }), OpenAI.BadRequestError);
    await assert.rejects(ask({ model: "nobody" }), OpenAI.NotFoundError);
  },
  async leaving_a_stream() {
    for await (const _ of await ask({ max_tokens: 500, stream: true })) break;
    assert.equal((await ask({ max_tokens: 1 })).choices.length, 1);
  },
};

for (const [name, run] of Object.entries(cases)) {
  let note = "";
  try {
    await run();
  } catch (error) {
    note = `${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ case: name, passed: note === "", note }));
}
