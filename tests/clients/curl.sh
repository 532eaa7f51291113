#!/usr/bin/env bash
# Every route of the API by curl alone. CHAT, MEDIA and EDIT are addresses of servers; ends at the first answer that is not right.
set -euo pipefail

json='content-type: application/json'
hello='"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 40, "parallel_tool_calls": false'

fail() {
    echo "failed: $1" >&2
    exit 1
}

# post ADDRESS/PATH BODY [MORE...]: the answer, which must be a 200.
post() {
    curl --silent --show-error --fail-with-body --max-time 60 -H "$json" "$1" -d "$2" "${@:3}"
}

# has NAME TEXT PATTERN
has() {
    grep -q -- "$3" <<<"$2" || fail "$1: no $3 in $2"
}

# status NAME EXPECTED [CURL ARGUMENTS...]
status() {
    local got
    got=$(curl --silent --max-time 60 -o answer.json -w '%{http_code}' "${@:3}")
    [ "$got" = "$2" ] || fail "$1: $got instead of $2: $(cat answer.json)"
}

# starts NAME FILE BYTES
starts() {
    [ "$(head -c ${#3} "$2" | tr -d '\0')" = "$3" ] || fail "$1: does not begin with $3"
}

has models "$(curl -sf "$CHAT/v1/models")" '"id":"smol-speech"'
has model "$(curl -sf "$CHAT/v1/models/smol-speech")" '"object":"model"'

has chat "$(post "$CHAT/v1/chat/completions" "{$hello}")" Paris
stream=$(post "$CHAT/v1/chat/completions" "{$hello, \"stream\": true, \"stream_options\": {\"include_usage\": true}}" -N)
has "streamed chat" "$stream" '"finish_reason":"stop"'
has "streamed usage" "$stream" '"completion_tokens":'
has "streamed end" "$stream" '^data: \[DONE\]'
spoken=$(post "$CHAT/v1/chat/completions" \
    "{$hello, \"stream\": true, \"modalities\": [\"text\", \"audio\"], \"audio\": {\"voice\": \"heart\", \"format\": \"pcm16\"}}" -N)
has "streamed audio" "$spoken" '"data":"'
has "streamed transcript" "$spoken" '"transcript":"'

tools='"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": false}}}]'
has tools "$(post "$CHAT/v1/chat/completions" "{$hello, $tools, \"tool_choice\": \"required\"}")" '"name":"weather"'
streamed=$(post "$CHAT/v1/chat/completions" "{$hello, $tools, \"tool_choice\": \"required\", \"stream\": true}" -N)
has "streamed tools" "$streamed" '"name":"weather"'
has "streamed tools end" "$streamed" '"finish_reason":"tool_calls"'
shape='"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": {"type": "object",
    "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": false}}}'
has "response_format" "$(post "$CHAT/v1/chat/completions" "{$hello, $shape}")" '\\"yes\\"'
has completion "$(post "$CHAT/v1/completions" '{"prompt": "One, two,", "max_tokens": 3}')" '"text":"'

post "$CHAT/v1/audio/speech" '{"input": "The train leaves from platform nine.", "voice": "heart", "response_format": "wav"}' -o nine.wav
starts speech nine.wav RIFF
has transcription "$(curl -sf "$CHAT/v1/audio/transcriptions" -F file=@nine.wav -F model=smol-speech)" "[Pp]latform"
has "events of speech" "$(post "$CHAT/v1/audio/speech" '{"input": "Hi.", "stream_format": "sse", "response_format": "pcm"}' -N)" speech.audio.done

has image "$(post "$MEDIA/v1/images/generations" '{"prompt": "a cup", "size": "48x32", "num_inference_steps": 2}')" '"b64_json":"'
has "partial images" "$(post "$MEDIA/v1/images/generations" \
    '{"prompt": "a cup", "size": "48x32", "num_inference_steps": 4, "stream": true, "partial_images": 1}' -N)" image_generation.completed
post "$MEDIA/v1/images/generations" '{"prompt": "a cup", "size": "48x32", "num_inference_steps": 2}' |
    grep -o '"b64_json":"[^"]*' | cut -d '"' -f 4 | base64 -d >cup.png
starts png cup.png $'\x89PNG'
edit=(-F prompt="a red cat" -F size=64x64 -F bot_task=image -F num_inference_steps=2 -F "image[]=@cup.png" -F "image[]=@cup.png")
has edit "$(curl -sf "$EDIT/v1/images/edits" "${edit[@]}")" '"b64_json":"'
edits=$(curl -sfN "$EDIT/v1/images/edits" "${edit[@]}" -F stream=true -F partial_images=1)
has "partial edits" "$edits" image_edit.partial_image
has "streamed edit" "$edits" image_edit.completed
job=$(curl -sf "$MEDIA/v1/videos" -F prompt=rain -F num_frames=5 -F num_inference_steps=2 -F size=48x32 -F input_reference=@cup.png)
id=$(grep -o '"id":"[^"]*' <<<"$job" | cut -d '"' -f 4)
for _ in $(seq 200); do
    job=$(curl -sf "$MEDIA/v1/videos/$id")
    grep -qE '"status":"(queued|in_progress)"' <<<"$job" || break
    sleep 0.05
done
has video "$job" '"status":"completed"'
curl -sf "$MEDIA/v1/videos/$id/content" -o rain.mp4
[ "$(head -c 8 rain.mp4 | tail -c 4)" = ftyp ] || fail "video: no mp4"
has videos "$(curl -sf "$MEDIA/v1/videos")" "$id"
has "deleted video" "$(curl -sf -X DELETE "$MEDIA/v1/videos/$id")" '"deleted":true'
status "no such video" 404 "$MEDIA/v1/videos/$id"

status "unknown model" 404 "$CHAT/v1/chat/completions" -H "$json" -d "{$hello, \"model\": \"gpt\"}"
status "unknown field" 400 "$CHAT/v1/chat/completions" -H "$json" -d "{$hello, \"wings\": 2}"
has "field at fault" "$(cat answer.json)" wings
status "broken body" 400 "$CHAT/v1/chat/completions" -H "$json" -d "{"
status "no such route" 404 "$CHAT/v1/nothing"
status "wrong method" 405 "$CHAT/v1/chat/completions"
status "no file" 400 "$CHAT/v1/audio/transcriptions" -F model=smol-speech
status "not its task" 400 "$CHAT/v1/images/generations" -H "$json" -d '{"prompt": "a cup"}'
status "cannot edit" 400 "$MEDIA/v1/images/edits" -F prompt=x -F image=@cup.png
echo "all right"
