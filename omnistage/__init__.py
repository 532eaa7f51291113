"""OmniStage: stage-based serving of omni-modality models."""
