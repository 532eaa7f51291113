// The official openai-node client against servers: CHAT, MEDIA and EDIT are addresses. With RECORD=FILE every exchange is
// written down, one JSON line each, for tests/clients/test_node.py to send again where the package cannot be installed.
import assert from "node:assert/strict";
import { appendFileSync, writeFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";
import { Stream } from "openai/streaming";

const record = process.env.RECORD;
if (record) writeFileSync(record, "");

const KEPT_HEADERS = ["content-type", "accept", "authorization", "user-agent"];

// Notes request, status, content type and body of an exchange.
const noted = (server) => async (url, init) => {
  const request = new Request(url, { ...init, duplex: "half" });
  const body = Buffer.from(await request.clone().arrayBuffer());
  const answer = await fetch(request);
  const given = Buffer.from(await answer.clone().arrayBuffer());
  if (record && request.url.startsWith("http")) {
    const headers = Object.fromEntries(KEPT_HEADERS.filter((n) => request.headers.has(n)).map((n) => [n, request.headers.get(n)]));
    const { pathname, search } = new URL(request.url);
    const type = (answer.headers.get("content-type") ?? "").split(";")[0];
    const text = type === "application/json" || type === "text/event-stream" ? given.toString() : "";
    appendFileSync(record, JSON.stringify({
      server, method: request.method, path: pathname + search, headers, body: body.toString("base64"),
      status: answer.status, type, text: shortened(text),
    }) + "\n");
  }
  return answer;
};

// Long strings (media) tell nothing about an answer's shape.
const shortened = (text) => text.replace(/"([A-Za-z0-9+/=]{200,})"/g, '"AAAA"');

const client = (server) => new OpenAI({
  baseURL: `${process.env[server]}/v1`, apiKey: "none", maxRetries: 0, fetch: noted(server),
});
const chat = client("CHAT");
const media = client("MEDIA");
const edit = client("EDIT");

const model = "smol-speech";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model, messages, temperature: 0, max_completion_tokens: 40, seed: 5 };

const models = await chat.models.list();
assert.deepEqual(models.data.map((m) => m.id), [model]);
assert.equal((await chat.models.retrieve(model)).object, "model");

const whole = await chat.chat.completions.create(ask);
assert.match(whole.choices[0].message.content, /Paris/);
assert.equal(whole.choices[0].finish_reason, "stop");

let text = "", usage = null;
for await (const chunk of await chat.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
assert.match(await chat.chat.completions.stream(ask).finalContent(), /Paris/);

let sound = 0, transcript = "";
const audio = { voice: "heart", format: "pcm16" };
for await (const chunk of await chat.chat.completions.create({ ...ask, stream: true, modalities: ["text", "audio"], audio })) {
  const delta = chunk.choices[0]?.delta?.audio ?? {};
  sound += Buffer.from(delta.data ?? "", "base64").length;
  transcript += delta.transcript ?? "";
}
assert.match(transcript, /Paris/);
assert.ok(sound > 24000, "half a second of sound");

const parameters = {
  type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", strict: true, parameters } }];
const calling = await chat.chat.completions.create({ ...ask, tools, tool_choice: "required", parallel_tool_calls: false });
assert.equal(calling.choices[0].finish_reason, "tool_calls");
const made = calling.choices[0].message.tool_calls;
assert.ok(["Paris", "Rome"].includes(JSON.parse(made[0].function.arguments).city));
const streamedCall = await chat.chat.completions.stream({ ...ask, tools, tool_choice: "required", parallel_tool_calls: false })
  .finalChatCompletion();
assert.equal(streamedCall.choices[0].finish_reason, "tool_calls");
assert.deepEqual(streamedCall.choices[0].message.tool_calls[0].function.arguments, made[0].function.arguments);
const results = made.map((call) => ({ role: "tool", tool_call_id: call.id, content: "sunny" }));
const after = await chat.chat.completions.create({ ...ask, messages: [...messages, calling.choices[0].message, ...results], tools });
assert.ok(after.choices[0].message);

const response_format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema: parameters } };
const parsed = await chat.chat.completions.parse({ ...ask, response_format });
assert.ok(["Paris", "Rome"].includes(JSON.parse(parsed.choices[0].message.content).city));
const object = await chat.chat.completions.create({ ...ask, max_completion_tokens: 60, response_format: { type: "json_object" } });
assert.match(object.choices[0].message.content, /^\{/);

assert.ok((await chat.completions.create({ model, prompt: "One, two,", max_tokens: 3 })).choices[0].text);

const speech = await chat.audio.speech.create({ model, voice: "heart", input: "The train leaves from platform nine.", response_format: "mp3" });
const spoken = Buffer.from(await speech.arrayBuffer());
assert.ok(spoken.length > 2000);
const parts = [];
for await (const event of await chat.audio.speech.create({
  model, voice: "heart", input: "Hi.", response_format: "pcm", stream_format: "sse",
}).then((answer) => Stream.fromSSEResponse(answer, new AbortController()))) parts.push(event.type);
assert.equal(parts.at(-1), "speech.audio.done");
const heard = await chat.audio.transcriptions.create({ model, file: await toFile(spoken, "nine.mp3") });
assert.match(heard.text, /platform/i);
let caption = "";
for await (const event of await chat.audio.transcriptions.create({ model, file: await toFile(spoken, "nine.mp3"), stream: true })) {
  caption += event.type === "transcript.text.delta" ? event.delta : "";
}
assert.equal(caption.trim(), heard.text.trim());

const picture = { model: "tiny", prompt: "a cup", size: "48x32", num_inference_steps: 4 };
const image = await media.images.generate(picture);
const png = Buffer.from(image.data[0].b64_json, "base64");
assert.equal(png.subarray(1, 4).toString(), "PNG");
const kinds = [];
for await (const event of await media.images.generate({ ...picture, stream: true, partial_images: 1 })) kinds.push(event.type);
assert.deepEqual(kinds, ["image_generation.partial_image", "image_generation.completed"]);

const redraw = {
  model: "editor", prompt: "a red cat", size: "64x64", bot_task: "image", num_inference_steps: 2, seed: 42,
  image: [await toFile(png, "cup.png"), await toFile(png, "mug.png")],
};
const edited = await edit.images.edit(redraw);
assert.equal(Buffer.from(edited.data[0].b64_json, "base64").subarray(1, 4).toString(), "PNG");
const edits = [];
for await (const event of await edit.images.edit({ ...redraw, stream: true, partial_images: 1 })) edits.push(event.type);
assert.deepEqual(edits, ["image_edit.partial_image", "image_edit.completed"]);

let job = await media.videos.create({
  model: "tiny", prompt: "rain", size: "48x32", num_frames: 5, num_inference_steps: 2, input_reference: await toFile(png, "cup.png"),
});
while (["queued", "in_progress"].includes(job.status)) {
  await new Promise((resolve) => setTimeout(resolve, 50));
  job = await media.videos.retrieve(job.id);
}
assert.equal(job.status, "completed");
const film = Buffer.from(await (await media.videos.downloadContent(job.id)).arrayBuffer());
assert.equal(film.subarray(4, 8).toString(), "ftyp");
assert.equal((await media.videos.list()).data[0].id, job.id);
assert.ok((await media.videos.delete(job.id)).deleted);

await assert.rejects(chat.chat.completions.create({ ...ask, model: "gpt" }), OpenAI.NotFoundError);
await assert.rejects(chat.chat.completions.create({ ...ask, temperature: 3 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});
await assert.rejects(chat.images.generate({ model, prompt: "a cup" }), OpenAI.BadRequestError);
await assert.rejects(media.videos.retrieve(job.id), OpenAI.NotFoundError);
await assert.rejects(chat.chat.completions.create({ ...ask, messages: [] }), OpenAI.BadRequestError);
await assert.rejects(media.images.edit({ model: "tiny", prompt: "a mug", image: await toFile(png, "cup.png") }), OpenAI.BadRequestError);
console.log("all right");
