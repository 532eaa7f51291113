// The realtime socket of the official openai-node client against the server at CHAT.
import assert from "node:assert/strict";
import { once } from "node:events";
import { connect } from "node:net";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const client = new OpenAI({ baseURL: `${process.env.CHAT}/v1`, apiKey: "none" });
// The client speaks wss only: what TLS would carry goes over a plain connection here.
const options = { createConnection: ({ port, host }) => connect(port, host) };
const talk = new OpenAIRealtimeWS({ model: "smol-speech", options }, client);
const seen = [];
let fail;
const failed = new Promise((_, reject) => { fail = reject; });
failed.catch(() => {});
talk.on("event", (event) => seen.push(event));
talk.on("error", (error) => fail(error));

const until = (kind) => Promise.race([new Promise((resolve) => talk.once(kind, resolve)), failed]);
const deltas = (kind) => seen.filter((event) => event.type === kind).map((event) => event.delta);

assert.equal((await until("session.created")).session.type, "realtime");
talk.send({
  type: "session.update",
  session: { type: "realtime", instructions: "Be brief.", max_output_tokens: 24, audio: { output: { voice: "heart" } } },
});
assert.equal((await until("session.updated")).session.instructions, "Be brief.");

const said = { type: "message", role: "user", content: [{ type: "input_text", text: "What is the capital of France?" }] };
talk.send({ type: "conversation.item.create", item: said });
await until("conversation.item.done");
talk.send({ type: "response.create" });
const { response } = await until("response.done");
const [answer] = response.output[0].content;
assert.ok(answer.transcript.length > 0);
assert.equal(deltas("response.output_audio_transcript.delta").join(""), answer.transcript);
const sound = deltas("response.output_audio.delta").map((delta) => Buffer.from(delta, "base64"));
assert.ok(Buffer.concat(sound).length > 12000, "a quarter of a second of sound");
assert.ok(response.usage.output_tokens > 0);

const input = "The train leaves from platform nine.";
const speech = await client.audio.speech.create({ model: "smol-speech", voice: "heart", input, response_format: "pcm", seed: 1 });
const spoken = Buffer.from(await speech.arrayBuffer());
const silence = Buffer.alloc(24000);
talk.send({ type: "session.update", session: { type: "realtime", audio: { input: { turn_detection: null, transcription: {} } } } });
await until("session.updated");
talk.send({ type: "input_audio_buffer.append", audio: Buffer.concat([silence, spoken, silence]).toString("base64") });
talk.send({ type: "input_audio_buffer.commit" });
const heard = await until("conversation.item.input_audio_transcription.completed");
assert.match(heard.transcript, /platform/i);

const refused = new Promise((resolve) => { fail = resolve; });
talk.send({ type: "response.create", response: { output_modalities: ["smell"] } });
assert.equal((await refused).error.type, "invalid_request_error");

talk.close();
await once(talk.socket, "close");
console.log("all right");
