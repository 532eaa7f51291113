"""The thinker of tiny-shapes: SmolLM2-135M, of which only the hidden states of the prompt are used."""

from __future__ import annotations

from dataclasses import replace

from omnistage.config.model import StageContext
from omnistage.models.smollm2 import SMOLLM2
from omnistage.ops.paged_attention import AttentionPlan
from omnistage.payload import MultimodalPayload
from omnistage.stages.ar.model import Emitted, Event, Produced, Sequence, Work
from omnistage.stages.ar.text_model import CausalTextModel, TextState
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.ar.torch_model import ForwardResult, ModelShape, SequenceMemory


class HiddenTextModel(CausalTextModel):
    """Keeps the hidden row of every position and gives those of the prompt when the request ends."""

    @property
    def shape(self) -> ModelShape:
        return replace(super().shape, handoff_width=self._decoder.config.hidden_size)

    def forward(self, works: list[Work[TextState]], plan: AttentionPlan) -> ForwardResult:
        result = super().forward(works, plan)
        return ForwardResult(result.hidden, result.hidden)

    def emit(self, seq: Sequence[TextState], event: Event, memory: SequenceMemory) -> Emitted:
        """The port "hidden": float32 [prompt tokens, width], after the final norm."""
        if event.finish is None:
            return Emitted()
        rows = memory.handoff(0, seq.prompt_len).float().cpu().numpy()
        return Emitted((Produced(port="hidden", payload=MultimodalPayload.of({}, hidden=rows), final=True),))


def create(context: StageContext) -> TorchBackend[TextState]:
    """Component factory of the stage `thinker`."""
    folder = SMOLLM2.locate(context.model_path, context.config.cache_dir)
    return TorchBackend(HiddenTextModel(folder, context.stage), context.stage)
