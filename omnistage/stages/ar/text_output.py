"""What a text-writing request gives out: detokenised deltas, token ids, logprobs, finish reason and usage."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from omnistage.config.model import TextMarkup
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.detokenizer import Detokenizer, StopStrings
from omnistage.stages.ar.logprobs import describe, describe_prompt
from omnistage.stages.ar.model import Emitted, Event, Produced, Sampled, Sequence
from omnistage.stages.ar.sections import Piece, Sections
from omnistage.stages.ar.torch_model import SequenceMemory


class TextOutput:
    """The text of one request, for its port "text".

    Chunks carry meta `text` (the delta) and `token_ids` (those it came from), `logprobs` if asked for; the final one
    also `finish_reason` and `usage`. Where `sections` tell, a chunk's text is a thought (`reasoning` True), and
    `tool_calls` has news of calls (see `CallDelta`).
    """

    __slots__ = ("_detokenizer", "_params", "_pending", "_said_prompt", "_stops", "_tokenizer", "sections")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, sections: Sections | None = None) -> None:
        self.sections = sections or Sections(TextMarkup(), None)
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop)
        self._pending: list[Sampled] = []
        self._said_prompt = False

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete: the tokens that wrote it are no part of the answer."""
        return self._stops.found is not None

    @property
    def withholds(self) -> bool:
        """True while text waits that may be the beginning of a stop string, of thoughts or of a call."""
        return bool(self._stops.withheld) or self.sections.uncertain

    @property
    def unsaid(self) -> bool:
        """True when the tokens that waited are not to be spoken: they wrote a stop string, a thought or a call."""
        return self.stopped or self.sections.unsaid

    def emit(self, seq: Sequence[Any], event: Event, memory: SequenceMemory) -> Emitted:
        """Takes note of a token or the end; gives the chunk that follows from it, if any."""
        text = ""
        if event.sampled is not None:
            self._pending.append(event.sampled)
            if event.finish is not FinishReason.STOP:
                text = self._push(event)
        pieces = self.sections.push(text)
        finish = FinishReason.STOP if self.stopped or self.sections.over else event.finish
        if finish is not None:
            pieces = self._close(pieces)
        if not pieces:
            return Emitted()
        last = len(pieces) - 1
        outputs = [
            Produced(
                port="text",
                payload=self._payload(seq, event, piece, finish if index == last else None, memory),
                final=finish is not None and index == last,
            )
            for index, piece in enumerate(pieces)
        ]
        return Emitted(tuple(outputs), stop=self.stopped or self.sections.over)

    def _close(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces with all that was held back; at least one, which can be final."""
        rest = "" if self.stopped else self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return [*pieces, *self.sections.push(rest), *self.sections.flush()] or [Piece()]

    def _push(self, event: Event) -> str:
        """The text that an ordinary token makes certain. Stop strings begin to count after `min_tokens` tokens."""
        delta = self._detokenizer.push(event.sampled.token) if event.sampled is not None else ""
        if event.generated <= self._params.min_tokens:
            return delta
        return self._stops.push(delta)

    def _payload(
        self, seq: Sequence[Any], event: Event, piece: Piece, finish: FinishReason | None, memory: SequenceMemory
    ) -> MultimodalPayload:
        payload = MultimodalPayload.text(piece.text, token_ids=[one.token for one in self._pending])
        if piece.reasoning:
            payload.meta["reasoning"] = True
        if piece.calls:
            payload.meta["tool_calls"] = piece.calls
        if seq.params.logprobs:
            payload.meta["logprobs"] = [describe(self._tokenizer, one) for one in self._pending]
        if seq.params.prompt_logprobs and not self._said_prompt:
            self._said_prompt = True
            payload.meta["prompt_logprobs"] = describe_prompt(self._tokenizer, memory.prompt_logprobs())
        self._pending = []
        if finish is not None:
            payload.meta["finish_reason"] = finish.value
            payload.meta["usage"] = {
                "prompt_tokens": seq.prompt_len,
                "completion_tokens": event.generated,
                "cached_tokens": seq.cached_tokens,
            }
        return payload
